"""Writes docs/algorithms.md: every algorithm by name, from the docstrings of the rules. Run it after changing one.

    python docs/write_algorithms.py
"""

from __future__ import annotations

import inspect
import json
import runpy
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.config import RULES_BY_KEY
from sparring.algo.correction.rule import PRESETS, Correction
from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.kl import Kl
from sparring.algo.loss.preference.config import PreferenceLoss
from sparring.algo.presets import ALGORITHMS
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
        RULES_BY_KEY["credit"],
    ),
    ("Ratio", "What one probability ratio belongs to. `algo/ratio/`.", RULES_BY_KEY["ratio"]),
    ("Gate", "What is made of ratio and advantage. `algo/gate/`.", RULES_BY_KEY["gate"]),
    (
        "Correction",
        "What is done about an engine whose probabilities are not the trainer's, and about stale weights. `algo/correction/`.",
        (Correction,),
    ),
    ("KL in the loss", "A penalty for leaving a reference. `algo/kl.py`.", (Kl,)),
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
    named = [*_presets("Algorithms by name", '`preset = "gspo"` fills in what is not given beside it.', ALGORITHMS)]
    named += _presets("Corrections by name", '`correction = "tis"` stands for these settings.', PRESETS)
    return "\n".join([HEAD, *named, *(line for section in SECTIONS for line in _section(*section))])


def _presets(title: str, lead: str, presets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"## {title}\n\n{lead}\n\n| name | settings |\n| --- | --- |"
    for name, settings in presets.items():
        cells = ", ".join(f"`{key} = {_toml(value)}`" for key, value in settings.items())
        yield f"| `{name}` | {cells or 'the defaults'} |"
    yield ""


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


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
