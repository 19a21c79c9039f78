"""Checkpoint folders: the check that a folder holds a causal language model, and the outline of this model."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from sparring.errors import BadInput, boundary, refusal
from sparring.model.hub import base_folder
from sparring.model.library import class_of
from sparring.model.outline import Outline, outline


def checkpoint_outline(folder: Path) -> Outline:
    """Return the outline of the checkpoint in `folder`, or of an adapter's base, with the defaults of `outline`.

    Raises:
        BadInput: the folder has no config or no weights, or transformers cannot make a model of the config.
    """
    folder = base_folder(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise refusal(
            str(folder), "weights (*.safetensors)", "none in the folder", "copy or download the whole checkpoint"
        )
    _check_config(folder / "config.json")
    return outline(folder, numerics="fast")


def _check_config(file: Path) -> None:
    """Refuse a file that is no JSON object, or whose architecture is no causal language model."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(str(file), "a model's config", str(error), "repair the checkpoint") from error
    if not isinstance(config, dict):
        raise refusal(str(file), "a JSON object", type(config).__name__, "repair the checkpoint")
    with boundary(BadInput, str(file), "a config that the library knows", "check the model's path"):
        parsed = AutoConfig.from_pretrained(file.parent)
    if class_of(parsed) is AutoModelForCausalLM and type(parsed) not in AutoModelForCausalLM._model_mapping:
        raise refusal(
            str(file), "a causal LM's config", f"the config of a {parsed.model_type} model", "check the model's path"
        )
