"""Writes docs/algorithms.md: every algorithm by name, from the docstrings of the rules and the sources in
docs/algorithms.toml. Run it after changing one.

python docs/write_algorithms.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import runpy
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from sparring.algo import aggregation
from sparring.algo.config import AlgoConfig
from sparring.algo.correction.presets import CORRECTIONS
from sparring.algo.correction.rule import Correction
from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.kl import Kl
from sparring.algo.preference_rules import PreferenceLoss
from sparring.algo.presets import ALGORITHMS
from sparring.algo.right_answers import RightAnswers
from sparring.algo.rules import CreditRule, GateRule, RatioRule, ShapingRule
from sparring.algo.shaping.kl_reward import KlReward
from sparring.recipe.sections.distill import DistillConfig
from sparring.recipe.sections.preference import BradleyTerryConfig, StepsConfig, TurnsConfig
from sparring.recipe.sections.rl import ImplicitConfig

PAGE = Path(__file__).with_name("algorithms.md")
SOURCES: Mapping[str, Any] = tomllib.loads(PAGE.with_suffix(".toml").read_text(encoding="utf-8"))
WRAP = runpy.run_path(str(PAGE.with_name("wrap.py")))
CONFIGURATION: Mapping[str, Any] = runpy.run_path(str(Path(__file__).with_name("write_configuration.py")))

HEAD = """# Algorithms

An algorithm consists of parts, each chosen by name; a [preset](#algorithms-by-name) chooses all of them. A part is one small file, and
its docstring is printed here: what it does, its formula, the paper, when to use it, and its settings. A name alone takes the
defaults; with settings it is a table:

    [algo]
    credit = {name = "pass_at_k", k = 8}

Each part names its source, a paper or a project (*From*), the source of each default, and the points in which the source differs
(*Differs*; without such a line none are known). "ours" is a default without a source, "off" one at which a setting does nothing. A preset
also has the differences of its parts.

Every name has golden vectors (`tests/golden`): an independent NumPy reference in float64, an example worked by hand and random cases.
`tests/golden/vectors.jsonl` has the vectors as JSON, one per line, for any framework.

*This page is written by `docs/write_algorithms.py` from the code.*
"""

HELD = """## Held against others

Our own references share our misreadings. So the algorithms are also compared with independent code and sums:

| what | against | command |
| --- | --- | --- |
| every advantage estimator and policy loss that verl registers, every aggregation, KL estimate, importance weight and rejection \
that it has a name for, its critic's loss and its adaptive coefficient: values and gradients to 1e-6, float64, several turns | \
verl 0.9.1 in a separate process | `make test-peers` |
| preference losses: batch, loss, gradients | TRL's trainers | `make test-trl` |
| the whole trainer, from groups with rewards to weights: losses to 1e-5, gradient norms to 1e-4, relative; `grpo`, `dapo`, \
`dr_grpo`, `gspo`, and a proximal anchor with `tis`, k3 and an entropy bonus; for a whole model and an adapter | a plain `transformers` model and \
`torch.optim.AdamW`, one forward per rollout | `pytest tests/parity/test_plain_loop.py` |
| `turn_level`, `gigpo`, `process`, `hierarchical`, `rae`, `topr`, `vespo`, `m2po` | the exact mean of the gradient over all outcomes of a \
bandit with two turns | `pytest tests/parity/test_enumerated_bandit.py` |
| `reinforce`, `gae`, `rloo`, `grpo`, `gigpo`, `turn_level`, `process`, `prime`, `reinforce_plus_plus`, `optimal_token_baseline` | the exact mean of the gradient in bandits that branch: sub-agents, a summary, a deleted reply | `pytest tests/parity/test_branched_bandit.py` |
| returns and values across tool calls, groups of equal rewards, missing parts, denominators, positions of teachers' scores | sums \
from public bug reports of nine trainers, worked by hand | `pytest tests/parity/test_golden_reports.py` |

Names of verl without a counterpart are listed with the reason (`APART` in `tests/peers`): `grpo_passk`, `dro`, the
aggregation `token-sum` and the estimate `full`. The suffix `+` of an estimate (its value with k2's gradient) has none either. A newer verl with a name that is neither compared nor listed fails the tests. Some \
comparisons hold only up to a known factor or for a part of the settings:

- verl divides by deviations over n - 1 tokens (`gae`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`; over all tokens also \
in `gdpo`), ours over n (in `gdpo` over rollouts, as its equation has it);
- `dppo_tv`, `dppo_kl` and `gpg` write the same gradient as weight * log pi, so their values are our gradient times log pi; \
verl's additional bound on the ratio of the first two is disabled;
- verl's `clip_cov` draws at random: compared with all candidates drawn and no other ratio clipped;
- verl's `gpg` counts rewards other than 0, the paper groups with different rewards: compared with equal counts;
- verl's `optimal_token_baseline` counts tool tokens as positions: compared over single turns, `tir_optimal_token_baseline` over several;
- for rejections, the rejected tokens are compared, but not the denominator of the others.

Most of the enumerated rules have an expected gradient in closed form: `gigpo` (without division), `hierarchical`, `rae`, `topr`, \
`vespo`, `turn_level` in groups of two, `process` with one rollout, `m2po` without a bound. `process` in larger groups and the masks \
of `m2po` have none: there the equation itself is summed over all outcomes.
"""

SECTIONS: tuple[tuple[str, str, tuple[type[msgspec.Struct], ...]], ...] = (
    (
        "Credit",
        "Rules that turn scores into advantages of sampled tokens. Members of a group are compared role by role; rollouts lost "
        "to infrastructure are not members; a token that branches share counts once. `algo/credit/`, rare ones `algo/rare/credit/`.",
        typing.get_args(CreditRule),
    ),
    (
        "Shaping",
        "Changes of scores before credit. `algo/shaping/`, rare ones `algo/rare/shaping/`.",
        (*typing.get_args(ShapingRule), KlReward),
    ),
    (
        "Preference",
        "Losses over compared or labelled replies, for `[preference] loss` and `[rl] preference`; see "
        "[Preferences and reward models](preference.md). `algo/loss/preference/`, rare ones `algo/rare/preference/`.",
        typing.get_args(PreferenceLoss),
    ),
    (
        "Reward models",
        "Losses of a scalar head, for `[reward_model] loss`; and of a language model trained with the policy, for `[rl.implicit]`.",
        (BradleyTerryConfig, ImplicitConfig, StepsConfig, TurnsConfig),
    ),
    (
        "Distillation",
        "Loss of a student on the tokens that it sampled, from teachers' scores, for `[distill]`; see "
        "[Distillation](path/distill.md). `algo/loss/distill.py`, `model/divergence.py`.",
        (DistillConfig,),
    ),
    ("Selection", "Rules that select the scored groups to train. `algo/filter/`.", (Difficulty,)),
    (
        "Ratio",
        "The unit of one probability ratio r: token, turn or sequence. Its denominator is the anchor: the recorded log-probability, the trainer's own before the "
        "update (`proximal`), or an estimate of it from the versions of tokens (`loglinear`). `algo/ratio.py`.",
        typing.get_args(RatioRule),
    ),
    (
        "Gate",
        "The policy term as a function of the ratio r and the advantage A, token by token. `algo/gate/`, rare ones "
        "`algo/rare/gate/`.",
        typing.get_args(GateRule),
    ),
    (
        "Correction",
        "`[algo] correction`: a name of the table below, or a table of settings. `algo/correction/`.",
        (Correction,),
    ),
    ("Imitation", "`[algo.right_answers]`: a loss in the imitate term, added to the policy's.", (RightAnswers,)),
    ("KL in the loss", "`[algo.kl]`. `kl_reward` above is the one in the reward.", (Kl,)),
)


def page() -> str:
    """The whole page."""
    sections = [line for section in SECTIONS for line in _section(*section)]
    return WRAP["wrapped"](
        WRAP["fenced"]("\n".join([HEAD, *_presets(), *sections, *_corrections(), *_aggregations(), *_defaults(), HELD]))
    )


def _section(title: str, lead: str, kinds: tuple[type[msgspec.Struct], ...]) -> Iterator[str]:
    yield f"## {title}\n\n{lead}\n"
    for kind in sorted(kinds, key=_name):
        yield f"### `{_name(kind)}`\n\n{inspect.getdoc(kind)}\n"
        yield from _origin(source_of(kind))
        yield from _settings(kind)


def source_of(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the entry of a rule in docs/algorithms.toml."""
    entry: Mapping[str, Any] = SOURCES["rules"][kind.__name__]
    return entry


def _origin(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the source of a rule or preset, and the points in which the source differs."""
    yield f"*From*: {entry['source']}.\n"
    differences = entry.get("differences", ())
    if len(differences) == 1:
        yield f"*Differs*: {differences[0]}\n"
    elif differences:
        yield "\n".join(["*Differs*:\n", *(f"- {one}" for one in differences), ""])


def _corrections() -> Iterator[str]:
    yield "## Corrections by name\n\n| name | what it sets | from | differs |\n| --- | --- | --- | --- |"
    for name, settings in CORRECTIONS.items():
        entry = SOURCES["corrections"][name]
        sets, differs = "<br>".join(_lines(settings)) or "nothing", " ".join(entry.get("differences", ()))
        yield f"| `{name}` | {sets} | {entry['source']} | {differs} |"
    yield ""


def _aggregations() -> Iterator[str]:
    yield f"## Aggregation\n\n`[algo] aggregation`: weight of each token. {_literal(aggregation, 'Aggregation')}\n"


def _presets() -> Iterator[str]:
    yield "## Algorithms by name\n\n`[algo] preset` sets every key that the recipe does not. Keys that a preset leaves out keep the"
    yield "[default](#defaults-of-algo).\n"
    for name, settings in ALGORITHMS.items():
        yield f"### preset `{name}`\n\n{', '.join(_lines(settings))}\n"
        yield from _origin(SOURCES["presets"][name])


def _defaults() -> Iterator[str]:
    yield "## Defaults of `[algo]`\n\nWhat each key means stands in [the configuration](configuration.md).\n"
    yield from _origin(source_of(AlgoConfig))
    yield "| key | from |\n| --- | --- |"
    for name, source in source_of(AlgoConfig)["defaults"].items():
        yield f"| `{name}` | {source} |"
    yield ""


def _lines(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        inner = ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items()) if isinstance(value, Mapping) else ""
        yield f"`{key} = {{ {inner} }}`" if inner else f"`{key} = {json.dumps(value)}`"


def _literal(module: ModuleType, name: str) -> str:
    """The literal under a module's name."""
    body = ast.parse(inspect.getsource(module)).body
    for node, after in itertools.pairwise(body):
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and target.id == name and isinstance(after, ast.Expr):
            return str(ast.literal_eval(after.value)).strip()
    raise LookupError(f"{module.__name__} has no text under {name}")


def _settings(kind: type[msgspec.Struct]) -> Iterator[str]:
    fields = msgspec.structs.fields(kind)
    if fields:
        docs = CONFIGURATION["_field_docs"](kind)
        yield "| setting | type | default | from | |\n| --- | --- | --- | --- | --- |"
        for field in fields:
            source = source_of(kind).get("defaults", {}).get(field.name, "")
            cells = CONFIGURATION["_type"](field.type), CONFIGURATION["_default"](field), source, docs[field.name]
            yield f"| `{field.name}` | {' | '.join(cells)} |"
        yield ""


def _name(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag or kind.__name__.removesuffix("Config").lower())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
