"""Choice of `train.token_budget` by the machine's memory, if the recipe leaves it open."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparring.errors import BadInput
from sparring.model.hub import model_folder
from sparring.model.outline import Outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY
from sparring.stages.preflight.machine import machine_memory
from sparring.stages.preflight.memory import GIB, RunMemory, resident, shapes_of
from sparring.train.config import MOST_TOKENS

LEAST_TOKENS = 256
"""Minimum number of tokens of a micro-batch; with fewer, the processor is not busy."""
SHARE = 0.5
"""Largest share of the machine's memory that a run takes by its own choice; tools, boxes and files need the rest."""


def sized(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the recipe with the token budget for this machine, and a sentence about it.

    The sentence is empty if the memory of a GPU decides, or if the recipe will be refused for its models.
    """
    if config.run.device != "cpu":
        return _with(config, MOST_TOKENS), ""
    spec = config.models[POLICY]
    try:
        shapes = shapes_of(config, None if spec.path is None else model_folder(spec))
        return chosen(config, shapes, machine_memory(), resident())
    except BadInput:
        return _with(config, MOST_TOKENS), ""


def chosen(config: RunConfig, shapes: Mapping[str, Outline], memory: int, process: int = 0) -> tuple[RunConfig, str]:
    """Return the recipe with the largest of 8192, 4096, ..., 256 tokens with which the run takes at most `SHARE` of the
    memory, or with 256 if none of these fits; and a sentence with the reason. The run is counted as one process,
    whatever its layout, because its bits depend on the number (law 3)."""
    tokens, most = MOST_TOKENS, SHARE * memory
    engine = msgspec.structs.replace(config.engine, kind="native", urls=(), shared_folder="")
    alone = msgspec.structs.replace(config, cluster=type(config.cluster)(), engine=engine)
    while (total := RunMemory.of(_with(alone, tokens), shapes, process).total) > most and tokens > LEAST_TOKENS:
        tokens //= 2
    rank, much = ("most", "at most") if total <= most else ("least", "more than")
    why = f"the {rank} with which the run takes {much} half of this machine's {memory / GIB:.1f} GiB"
    return _with(config, tokens), f"memory: train.token_budget = {tokens}, {why}; the run keeps it"


def _with(config: RunConfig, tokens: int) -> RunConfig:
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, token_budget=tokens))
