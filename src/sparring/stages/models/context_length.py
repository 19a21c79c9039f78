"""Context length of a model: its outline (shapes only), and the maximum number of tokens of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparring.engine.config import EngineConfig
from sparring.errors import refusal
from sparring.model.config import DType
from sparring.model.hub import base_folder
from sparring.recipe.run_config import RunConfig
from sparring.types import POLICY

if TYPE_CHECKING:
    from sparring.model.outline import Outline


def outline_of(folder: Path, head: str = "tokens") -> Outline:
    """Return the outline of the checkpoint in `folder`, for an adapter of its base. The model must have the head
    `head`, as in `model.load.load`. Imports torch.

    Raises:
        BadInput: the folder has no weights; also for the reasons of `read_config` and `outline`.
    """
    from sparring.model.load import read_config
    from sparring.model.outline import outline

    folder = base_folder(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        where, weights = str(folder), "weights (*.safetensors)"
        raise refusal(where, weights, "none in the folder", "copy or download the whole checkpoint")
    read_config(str(folder), "fast", head)
    return outline(folder, numerics="fast", scalar=head == "scalar")


def engine_of(config: RunConfig, name: str) -> EngineConfig:
    """Return the engine settings of model `name`, as a cluster uses them: `[engine]` for the policy and, if native, for
    all models; otherwise the defaults."""
    return config.engine if name == POLICY or config.engine.kind == "native" else EngineConfig()


def max_context(model: Outline, engine: EngineConfig, dtype: DType) -> int:
    """Return the maximum number of tokens of one conversation: the model's positions or the engine's cache, whichever
    is less."""
    return min(model.max_positions, engine.kv.capacity(model.token_bytes(dtype)))


def policy_context(config: RunConfig, folder: Path) -> int:
    """Return the maximum number of tokens of one conversation of the policy, whose checkpoint folder is `folder`."""
    return max_context(outline_of(folder), config.engine, config.models[POLICY].dtype)
