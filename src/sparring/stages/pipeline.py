"""The stages of a run by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sparring.stages import collect, distill, eval, export, init, preference, reward_model, rl, sft
from sparring.stages.context import Context

Stage = Callable[[Context], Awaitable[dict[str, Any]]]
"""Function that runs one stage and returns its result as plain data for the store."""

STAGES: Mapping[str, Stage] = {
    "init": init.run,
    "collect": collect.run,
    "sft": sft.run,
    "preference": preference.run,
    "reward_model": reward_model.run,
    "rl": rl.run,
    "distill": distill.run,
    "eval": eval.run,
    "export": export.run,
}
