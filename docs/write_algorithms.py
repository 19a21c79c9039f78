"""Writes docs/algorithms.md: every algorithm by name, from the docstrings of the rules. Run it after changing one.

python docs/write_algorithms.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import runpy
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from sparring.algo import aggregation
from sparring.algo.config import AlgoConfig
from sparring.algo.correction.presets import PRESETS as CORRECTIONS
from sparring.algo.correction.rule import Correction
from sparring.algo.facts import Facts, Preset
from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.kl import Kl
from sparring.algo.loss.preference.config import PreferenceLoss
from sparring.algo.presets import PRESETS
from sparring.algo.right_answers import RightAnswers
from sparring.algo.rules import CreditRule, GateRule, RatioRule, ShapingRule
from sparring.algo.shaping.kl_reward import KlReward
from sparring.recipe.sections.distill import DistillConfig
from sparring.recipe.sections.preference import BradleyTerryConfig, StepsConfig, TurnsConfig
from sparring.recipe.sections.rl import ImplicitConfig
from sparring.recipe.sources import FACTS

PAGE = Path(__file__).with_name("algorithms.md")
WRAP = runpy.run_path(str(PAGE.with_name("wrap.py")))
CONFIGURATION: Mapping[str, Any] = runpy.run_path(str(Path(__file__).with_name("write_configuration.py")))

HEAD = """# Algorithms

An algorithm is chosen part by part, each by name; a [preset](#algorithms-by-name) chooses all of them. A part is one small file whose
docstring is what stands here: what it does, its formula, the paper, when to use it, and its settings. A name alone takes the
defaults; with settings it is a table:

    [algo]
    credit = {name = "pass_at_k", k = 8}

Beside each stands what it was held against: the paper or whose code (*From*), where each default is from, and what the source does in
another way (*Differs*; where there is no such line we know of nothing). "ours" is a default that nobody else's text gives; "off"
one at which a setting does nothing. A preset differs in what its parts differ in, too.

Every name has golden vectors (`sparring.testing.golden`): an independent NumPy reference in float64, an example worked by hand and
random cases. `python -m sparring.testing.golden.dump` prints the vectors as JSON, one per line, for any framework.

*This page is written by `docs/write_algorithms.py` from the code.*
"""

HELD = """## Held against others

A reference that we wrote ourselves shares what we misread. So the algorithms are also held against code and sums that are not ours:

| what | against | command |
| --- | --- | --- |
| every advantage estimator and policy loss that verl registers, every aggregation, KL estimate, importance weight and rejection \
that it knows by a name, its critic's loss and its adaptive coefficient: values and gradients to 1e-6, float64, several turns | \
verl 0.9.1 in a process of its own | `make test-peers` |
| preference losses: batch, loss, gradients | TRL's trainers | `make test-trl` |
| the whole trainer, from groups with rewards to weights: losses to 1e-5, gradient norms to 1e-4, relative; `grpo`, `dapo`, \
`dr_grpo`, `gspo`, and a proximal anchor with `tis`, k3 and an entropy bonus; of a whole model and of an adapter | a plain `transformers` model and \
`torch.optim.AdamW`, one forward for each rollout | `pytest tests/parity/test_plain_loop.py` |
| `turn_level`, `gigpo`, `process`, `hierarchical`, `rae`, `topr`, `vespo`, `m2po` | the exact mean of the gradient over all that a \
bandit of two turns can give | `pytest tests/parity/test_enumerated_bandit.py` |
| `reinforce`, `gae`, `rloo`, `grpo`, `gigpo`, `turn_level`, `process`, `prime`, `reinforce_plus_plus`, `optimal_token_baseline` | the exact mean of the gradient in bandits that branch: sub-agents, a summary, a deleted reply | `pytest tests/parity/test_branched_bandit.py` |
| `survival = "inverse"`: updates of which rollouts are lost by a hazard per turn, with `reinforce`, `rloo` and `grpo` without its \
deviation | the gradient of the reward where nothing is lost, exactly, over all that can be sampled and lost | \
`pytest tests/parity/test_inverse_survival.py` |
| returns and values across tools, groups of equals, parts that are missing, what a loss is divided by, teachers' places | sums \
from public reports of wrong steps in nine trainers, worked by hand | `pytest tests/parity/test_golden_reports.py` |

A name of verl that has no counterpart stands in a list with the reason (`APART` in `tests/peers`): `grpo_passk`, `dro`, the
aggregation `token-sum` and the estimate `full`. The suffix `+` of an estimate (its value with k2's gradient) has none either. A newer verl with a name that is neither compared nor listed fails the tests. Where \
both sides agree only up to a known factor or in a part of their settings, the case says so:

- verl divides by deviations over n - 1 tokens (`gae`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`; over all tokens also \
in `gdpo`), ours over n (in `gdpo` over rollouts, as its equation has it);
- `dppo_tv`, `dppo_kl` and `gpg` write the same gradient as weight * log pi, so their values are those of our gradient times log pi; \
verl's further bound on the ratio of the former two is set out of reach;
- `clip_cov` draws at random: compared where all candidates are chosen and no ratio of the others is clipped;
- `gpg` counts rewards that are not 0 where the paper counts groups that differ: compared where these are equally many;
- `optimal_token_baseline` counts a tool's tokens as places: compared over single turns, `tir_optimal_token_baseline` over several;
- which tokens are rejected is compared, not what the others are divided by.

Of the enumerated rules most have their expected gradient in closed form: `gigpo` (without division), `hierarchical`, `rae`, `topr`, \
`vespo`, `turn_level` in groups of two, `process` with one rollout, `m2po` without a bound. `process` in larger groups and the masks \
of `m2po` have none: there the equation itself is summed over all that can happen.
"""

SECTIONS: tuple[tuple[str, str, tuple[type[msgspec.Struct], ...]], ...] = (
    (
        "Credit",
        "Rules that make advantages of scores, for every sampled token. Members of a group are compared role by role; a rollout "
        "that failed for an infrastructure reason is no member; a token that branches share counts once. `algo/credit/`.",
        typing.get_args(CreditRule),
    ),
    (
        "Shaping",
        "Changes of scores before credit. `algo/shaping/`.",
        (*typing.get_args(ShapingRule), KlReward),
    ),
    (
        "Preference",
        "Losses over compared or labelled replies, for `[preference] loss` and `[rl] preference`; see "
        "[Preferences and reward models](preference.md). `algo/loss/preference/`.",
        typing.get_args(PreferenceLoss),
    ),
    (
        "Reward models",
        "Losses of a scalar head, for `[reward_model] loss`; and of a language model beside the policy, for `[rl.implicit]`.",
        (BradleyTerryConfig, ImplicitConfig, StepsConfig, TurnsConfig),
    ),
    (
        "Distillation",
        "The loss by which a student learns from teachers on the tokens that it sampled, for `[distill]`; see "
        "[Distillation](path/distill.md). `algo/loss/distill.py`, `model/divergence.py`.",
        (DistillConfig,),
    ),
    ("Selection", "Rules that choose the scored groups to train. `algo/filter/`.", (Difficulty,)),
    (
        "Ratio",
        "The unit of one probability ratio r: token, turn or sequence. The ratio is to the anchor: the recorded log-probability, the trainer's own before the "
        "update (`proximal`), or an estimate of that from the versions of tokens (`loglinear`). `algo/ratio.py`.",
        typing.get_args(RatioRule),
    ),
    (
        "Gate",
        "The policy term as a function of the ratio r and the advantage A, token by token. `algo/gate/`.",
        typing.get_args(GateRule),
    ),
    (
        "Correction",
        "`[algo] correction`: a name of the table below, or a table of settings. `algo/correction/`.",
        (Correction,),
    ),
    ("Imitation", "`[algo.right_answers]`: a loss beside the policy's, in the imitate term.", (RightAnswers,)),
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
        yield from _origin(facts(kind))
        yield from _settings(kind)


def facts(kind: type[msgspec.Struct]) -> Facts:
    """Return the sources of a rule."""
    return FACTS[kind] if kind in FACTS else vars(kind)["facts"]


def _origin(of: Facts | Preset) -> Iterator[str]:
    """Yield the source of a rule or preset, and the points in which the source differs."""
    yield f"*From*: {of.source}.\n"
    if len(of.differences) == 1:
        yield f"*Differs*: {of.differences[0]}\n"
    elif of.differences:
        yield "\n".join(["*Differs*:\n", *(f"- {one}" for one in of.differences), ""])


def _corrections() -> Iterator[str]:
    yield "## Corrections by name\n\n| name | what it sets | from | differs |\n| --- | --- | --- | --- |"
    for name, one in CORRECTIONS.items():
        yield f"| `{name}` | {'<br>'.join(_lines(one.sets)) or 'nothing'} | {one.source} | {' '.join(one.differences)} |"
    yield ""


def _aggregations() -> Iterator[str]:
    yield f"## Aggregation\n\n`[algo] aggregation`: what each token counts. {_literal(aggregation, 'Aggregation')}\n"


def _presets() -> Iterator[str]:
    yield "## Algorithms by name\n\n`[algo] preset` fills in what the recipe does not say. What a preset does not set is the"
    yield "[default](#defaults-of-algo).\n"
    for name, one in PRESETS.items():
        yield f"### preset `{name}`\n\n{', '.join(_lines(one.sets))}\n"
        yield from _origin(one)


def _defaults() -> Iterator[str]:
    yield "## Defaults of `[algo]`\n\nWhat each key means stands in [the configuration](configuration.md).\n"
    yield from _origin(facts(AlgoConfig))
    yield "| key | from |\n| --- | --- |"
    for name, source in facts(AlgoConfig).defaults.items():
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
            source = facts(kind).defaults.get(field.name, "")
            cells = CONFIGURATION["_type"](field.type), CONFIGURATION["_default"](field), source, docs[field.name]
            yield f"| `{field.name}` | {' | '.join(cells)} |"
        yield ""


def _name(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag or kind.__name__.removesuffix("Config").lower())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
