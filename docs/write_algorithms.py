"""Writes docs/algorithms/: every algorithm by name, a page a family, from the docstrings of the rules and the sources in
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

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

DOCS = Path(__file__).parent
SOURCES: Mapping[str, Any] = tomllib.loads((DOCS / "algorithms.toml").read_text(encoding="utf-8"))
STRUCTS = runpy.run_path(str(DOCS / "structs.py"))
WRAP = runpy.run_path(str(DOCS / "wrap.py"))
FOLDER = DOCS / "algorithms"

HEAD = """# Algorithms

An algorithm consists of parts, each chosen by name; a preset chooses all of them. A part is one small file, and
its docstring is printed here: what it does, its formula, the paper, when to use it, and its settings. A name alone takes the
defaults; with settings it is a table:

    [algo]
    credit = {name = "pass_at_k", k = 8}

Each part names its source, a paper or a project (*From*), the source of each default, and the points in which the source differs
(*Differs*; without such a line none are known). "ours" is a default without a source, "off" one at which a setting does nothing. A preset
also has the differences of its parts.

Every name has golden vectors (`tests/golden`): an independent NumPy reference in float64, an example worked by hand and random cases.
`tests/golden/vectors.jsonl` has the vectors as JSON, one per line, for any framework.

| page | names |
| --- | --- |
"""

FOOT = "*These pages are written by `docs/write_algorithms.py` from the code.*\n"

HELD = """Our own references share our misreadings. So the algorithms are also compared with independent code and sums.

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
    yield "| name | what it sets | from | differs |\n| --- | --- | --- | --- |"
    for name, settings in CORRECTIONS.items():
        entry = SOURCES["corrections"][name]
        sets, differs = "<br>".join(_lines(settings)) or "nothing", " ".join(entry.get("differences", ()))
        yield f"| `{name}` | {sets} | {entry['source']} | {differs} |"
    yield ""


def _aggregations() -> Iterator[str]:
    yield f"`[algo] aggregation`: weight of each token. {_literal(aggregation, 'Aggregation')}\n"


def _presets(names: Sequence[str]) -> Iterator[str]:
    yield "`[algo] preset` sets every key that the recipe does not. Keys that a preset leaves out keep the"
    yield "[default](defaults.md).\n"
    for name in names:
        yield f"## `{name}`\n\n{', '.join(_lines(ALGORITHMS[name]))}\n"
        yield from _origin(SOURCES["presets"][name])


def _defaults() -> Iterator[str]:
    yield "What each key means stands in [the configuration](../configuration/algo.md).\n"
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
        docs = STRUCTS["field_docs"](kind)
        yield "| setting | type | default | from | |\n| --- | --- | --- | --- | --- |"
        for field in fields:
            source = source_of(kind).get("defaults", {}).get(field.name, "")
            cells = STRUCTS["type_of"](field.type), STRUCTS["default_of"](field), source, docs[field.name]
            yield f"| `{field.name}` | {' | '.join(cells)} |"
        yield ""


def _name(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag or kind.__name__.removesuffix("Config").lower())


Kinds = tuple[type[msgspec.Struct], ...]


class Part(NamedTuple):
    """One part of a page."""

    heading: str
    """Its heading; empty where the page has no other part."""

    lead: str
    """What stands below the heading."""

    kinds: Kinds = ()
    """Rules, each with its docstring and settings."""

    more: Callable[[], Iterator[str]] | None = None
    """Writer of what follows."""

    names: Sequence[str] = ()
    """Names that `more` gives a heading each."""


def _credit_of(settings: Mapping[str, Any]) -> object:
    credit = settings.get("credit", "grpo")
    return credit["name"] if isinstance(credit, Mapping) else credit


LOSSES = tuple(name for name, settings in ALGORITHMS.items() if _credit_of(settings) == "grpo")
OTHERS = tuple(name for name in ALGORITHMS if name not in LOSSES)
CREDIT: Kinds = typing.get_args(CreditRule)
RARE: Kinds = tuple(kind for kind in CREDIT if ".rare." in kind.__module__)
BY_TURN = frozenset(("gigpo", "hierarchical", "optimal_token_baseline", "prime", "process", "turn_level"))
"""Rare credit rules that tell turns or tokens of a rollout apart."""

MEMBERS = (
    "Members of a group are compared role by role; rollouts lost to infrastructure are not members; a token that branches "
    "share counts once."
)

PAGES: Mapping[str, tuple[str, tuple[Part, ...]]] = {
    "presets-loss.md": (
        "Presets: losses",
        (
            Part(
                "", "Advantages of GRPO, under the losses of many papers.", more=partial(_presets, LOSSES), names=LOSSES
            ),
        ),
    ),
    "presets-credit.md": (
        "Presets: credit",
        (
            Part(
                "", "Other rules of credit, with the loss of their paper.", more=partial(_presets, OTHERS), names=OTHERS
            ),
        ),
    ),
    "credit.md": (
        "Credit",
        (
            Part(
                "",
                f"Rules that turn scores into advantages of sampled tokens. {MEMBERS} `algo/credit/`. Rules of single "
                "papers: [of whole rollouts](credit-rollouts.md), [of turns and tokens](credit-turns.md).",
                tuple(kind for kind in CREDIT if kind not in RARE),
            ),
        ),
    ),
    "credit-rollouts.md": (
        "Rare credit of whole rollouts",
        (
            Part(
                "",
                f"[Credit](credit.md) rules of single papers that compare whole rollouts. {MEMBERS} `algo/rare/credit/`.",
                tuple(kind for kind in RARE if _name(kind) not in BY_TURN),
            ),
        ),
    ),
    "credit-turns.md": (
        "Rare credit of turns and tokens",
        (
            Part(
                "",
                f"[Credit](credit.md) rules of single papers that tell turns or tokens of a rollout apart. {MEMBERS} "
                "`algo/rare/credit/`.",
                tuple(kind for kind in RARE if _name(kind) in BY_TURN),
            ),
        ),
    ),
    "shaping.md": (
        "Shaping and selection",
        (
            Part(
                "Shaping",
                "Changes of scores before credit. `algo/shaping/`, rare ones `algo/rare/shaping/`.",
                (*typing.get_args(ShapingRule), KlReward),
            ),
            Part("Selection", "Rules that select the scored groups to train. `algo/filter/`.", (Difficulty,)),
        ),
    ),
    "gate.md": (
        "Gate",
        (
            Part(
                "",
                "The policy term as a function of the ratio r and the advantage A, token by token. `algo/gate/`, rare ones "
                "`algo/rare/gate/`.",
                typing.get_args(GateRule),
            ),
        ),
    ),
    "loss.md": (
        "Ratio, KL and other terms of the loss",
        (
            Part(
                "Ratio",
                "The unit of one probability ratio r: token, turn or sequence. Its denominator is the anchor: the recorded "
                "log-probability, the trainer's own before the update (`proximal`), or an estimate of it from the versions "
                "of tokens (`loglinear`). `algo/ratio.py`.",
                typing.get_args(RatioRule),
            ),
            Part(
                "Imitation",
                "`[algo.right_answers]`: a loss in the imitate term, added to the policy's.",
                (RightAnswers,),
            ),
            Part("KL", "`[algo.kl]`. [`kl_reward`](shaping.md#kl_reward) is the one in the reward.", (Kl,)),
            Part("Aggregation", "How losses of tokens become one number.", more=_aggregations),
        ),
    ),
    "correction.md": (
        "Correction",
        (
            Part(
                "Settings",
                "`[algo] correction`: a [name](#corrections-by-name), or a table of settings. `algo/correction/`.",
                (Correction,),
            ),
            Part("Corrections by name", "Each name stands for a table of settings.", more=_corrections),
        ),
    ),
    "preference.md": (
        "Preferences and reward models",
        (
            Part(
                "Preference",
                "Losses over compared or labelled replies, for `[preference] loss` and `[rl] preference`; see "
                "[Preferences and reward models](../preference.md). `algo/loss/preference/`, rare ones "
                "`algo/rare/preference/`.",
                typing.get_args(PreferenceLoss),
            ),
            Part(
                "Reward models",
                "Losses of a scalar head, for `[reward_model] loss`; and of a language model trained with the policy, for "
                "`[rl.implicit]`.",
                (BradleyTerryConfig, ImplicitConfig, StepsConfig, TurnsConfig),
            ),
        ),
    ),
    "distillation.md": (
        "Distillation",
        (
            Part(
                "",
                "Loss of a student on the tokens that it sampled, from teachers' scores, for `[distill]`; see "
                "[Distillation](../path/distill.md). `algo/loss/distill.py`, `model/divergence.py`.",
                (DistillConfig,),
            ),
        ),
    ),
    "defaults.md": ("Defaults of `[algo]`", (Part("", "Where the defaults are from.", more=_defaults),)),
    "held-against.md": ("Held against others", (Part("", HELD),)),
}
"""Heading and parts of each page, in the order of the index."""

PLACES = {kind: f"{file}#{_name(kind)}" for file, (_, parts) in PAGES.items() for part in parts for kind in part.kinds}
"""Page and anchor of each rule."""


def pages() -> dict[str, str]:
    """Return every page's text by its file name, `index.md` first."""
    rows = "".join(f"| [{title}]({file}) | {_links(file, parts)} |\n" for file, (title, parts) in PAGES.items())
    written = {"index.md": f"{HEAD}{rows}\n{FOOT}"}
    for file, (title, parts) in PAGES.items():
        written[file] = "\n".join([f"# {title}\n", *(line for part in parts for line in _part(part))])
    return {file: WRAP["wrapped"](WRAP["fenced"](text)) for file, text in written.items()}


def _links(file: str, parts: Sequence[Part]) -> str:
    names = [name for part in parts for name in (*sorted(map(_name, part.kinds)), *part.names)]
    return ", ".join(f"[`{name}`]({file}#{name})" for name in names) or parts[0].lead.split("\n\n")[0]


def _part(part: Part) -> Iterator[str]:
    if part.heading:
        yield f"## {part.heading}\n"
    yield f"{part.lead}\n"
    for kind in sorted(part.kinds, key=_name):
        yield f"{'###' if part.heading else '##'} `{_name(kind)}`\n\n{inspect.getdoc(kind)}\n"
        yield from _origin(source_of(kind))
        yield from _settings(kind)
    if part.more is not None:
        yield from part.more()


if __name__ == "__main__":
    WRAP["write"](FOLDER, pages())
