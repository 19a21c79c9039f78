"""A rule of `[algo]` is one file and one line in `algo/rules.py`: checked on the source."""

import ast
from pathlib import Path

import pytest

from sparring.algo.facts import name_of
from sparring.algo.rules import CreditRule, GateRule, RatioRule, ShapingRule, rules

SOURCE = Path(__file__).resolve().parents[2] / "src" / "sparring"
UNION = "algo/rules.py"
RULES = [rule for union in (CreditRule, RatioRule, GateRule, ShapingRule) for rule in rules(union)]
HOMES = {rule.__name__: rule.__module__.removeprefix("sparring.").replace(".", "/") + ".py" for rule in RULES}


def named(text: str) -> set[str]:
    """The rules that a module's code names: in imports, names and attributes."""
    words = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.alias(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                words.add(name)
    return words & HOMES.keys()


def test_nothing_but_the_union_names_a_rule() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert named(sources[UNION]) == HOMES.keys() and len(HOMES) == len(RULES) > 40
    for path, text in sources.items():
        own = {name for name, home in HOMES.items() if home == path}
        assert path == UNION or named(text) <= own, f"{path} names {named(text) - own}: ask a fact of the rule instead"


def test_a_credit_rule_and_a_gate_have_files_of_their_own() -> None:
    for rule in (*rules(CreditRule), *rules(GateRule)):
        assert sum(home == HOMES[rule.__name__] for home in HOMES.values()) == 1, name_of(rule)


@pytest.mark.parametrize(
    "text", ["from sparring.algo.credit.maxrl import MaxRl", "isinstance(rule, MaxRl)", "maxrl.MaxRl()"]
)
def test_a_module_that_names_a_rule_is_found(text: str) -> None:
    assert named(text) == {"MaxRl"}
