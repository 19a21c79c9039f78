"""A rule of `[algo]` is one file and one line in `algo/rules.py`: checked on the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

from sparring.algo.base import name_of
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


def findings() -> Iterator[str]:
    """Yield the modules that name a rule beside the union, and the credit rules and gates that share a file."""
    files = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    if named(files[UNION]) != HOMES.keys() or not len(HOMES) == len(RULES) > 40:
        yield f"{UNION}: does not name every rule once"
    for path, text in files.items():
        own = {name for name, home in HOMES.items() if home == path}
        if path != UNION and (others := named(text) - own):
            yield f"{path}: names {', '.join(sorted(others))}; ask a fact of the rule instead"
    for rule in (*rules(CreditRule), *rules(GateRule)):
        if sum(home == HOMES[rule.__name__] for home in HOMES.values()) != 1:
            yield f"{HOMES[rule.__name__]}: {name_of(rule)} shares its file with another rule"
