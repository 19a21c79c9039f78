"""Writes docs/algorithms.md: every algorithm by name, from the docstrings of the rules. Run it after changing one.

    python docs/write_algorithms.py
"""

from __future__ import annotations

import inspect
import runpy
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.credit.rules import CreditRule
from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.loss.preference.config import PreferenceLoss
from sparring.algo.shaping.kl_reward import KlReward
from sparring.algo.shaping.rules import ShapingRule
from sparring.stages.config import BradleyTerryConfig, DistillConfig, StepsConfig

PAGE = Path(__file__).with_name("algorithms.md")
CONFIGURATION: Mapping[str, Any] = runpy.run_path(str(Path(__file__).with_name("write_configuration.py")))

HEAD = """# Algorithms

An algorithm is chosen part by part, each by name. A part is one small file whose docstring is what stands here: what it does, its
formula, the paper, when to use it, and its settings. A name alone takes the defaults; with settings it is a table:

    [algo]
    credit = {name = "pass_at_k", k = 8}

Every name has golden vectors (`sparring.testing.golden`): an independent NumPy reference in float64, an example worked by hand and
random cases. `python -m sparring.testing.golden.dump` prints the vectors as JSON, one per line, for any framework.

*This page is written by `docs/write_algorithms.py` from the code.*
"""

SECTIONS: tuple[tuple[str, str, tuple[type[msgspec.Struct], ...]], ...] = (
    (
        "Credit",
        "What of a score each sampled token is credited with. Members of a group are compared role by role; what failed for an "
        "infrastructure reason is no member; a token that branches share counts once. `algo/credit/`.",
        typing.get_args(CreditRule),
    ),
    (
        "Shaping",
        "What is added to scores before credit. `algo/shaping/`.",
        (*typing.get_args(ShapingRule), KlReward),
    ),
    (
        "Preference",
        "What is learned from compared or labelled replies, by `[preference] loss` and `[rl] preference`; "
        "[Preferences and reward models](preference.md) says how. `algo/loss/preference/`.",
        typing.get_args(PreferenceLoss),
    ),
    (
        "Reward models",
        "What a scalar head learns, by `[reward_model] loss`.",
        (BradleyTerryConfig, StepsConfig),
    ),
    (
        "Distillation",
        "What a student learns from teachers on the tokens that it sampled, by `[distill]`; [Distillation](path/distill.md) says "
        "how. `algo/loss/distill.py`, `model/divergence.py`.",
        (DistillConfig,),
    ),
    ("Selection", "Which scored groups are trained. `algo/filter/`.", (Difficulty,)),
)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for section in SECTIONS for line in _section(*section))])


def _section(title: str, lead: str, kinds: tuple[type[msgspec.Struct], ...]) -> Iterator[str]:
    yield f"## {title}\n\n{lead}\n"
    for kind in sorted(kinds, key=_name):
        yield f"### `{_name(kind)}`\n\n{inspect.getdoc(kind)}\n"
        yield from _settings(kind)


def _settings(kind: type[msgspec.Struct]) -> Iterator[str]:
    fields = msgspec.structs.fields(kind)
    if fields:
        docs = CONFIGURATION["_field_docs"](kind)
        yield "| setting | type | default | |\n| --- | --- | --- | --- |"
        for field in fields:
            cells = CONFIGURATION["_type"](field.type), CONFIGURATION["_default"](field), docs[field.name]
            yield f"| `{field.name}` | {' | '.join(cells)} |"
        yield ""


def _name(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag or kind.__name__.removesuffix("Config").lower())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
