"""What a checkpoint is to the transformers library: which class loads it, and which part of that computes text."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn


def class_of(config: Any) -> Any:
    """The library's class over tokens; of a model that sees or hears too, the one that does."""
    several = transformers.AutoModelForImageTextToText
    composite = config.get_text_config() is not config and type(config) in several._model_mapping
    return several if composite else transformers.AutoModelForCausalLM


def text_model(module: nn.Module) -> nn.Module:
    """The part between tokens and head: of a model that sees or hears too its language model, of another one its
    base."""
    composite = module.config.get_text_config() is not module.config
    return module.get_decoder() if composite else module.base_model


class NonTextParts:
    """The parts of a model that sees or hears too with which it does, by name; of other models none."""

    def __init__(self, module: nn.Module) -> None:
        self._module, text = module, text_model(module)
        kept = {text, module.get_output_embeddings(), getattr(module, "score", None)}
        self._paths: list[str] = []
        bases = {"": module, f"{module.base_model_prefix}.": module.base_model}
        for prefix, parent in bases.items() if text is not module.base_model else ():
            parts = {name: {*part.modules()} for name, part in parent.named_children()}
            parts |= {name: set() for name, _ in parent.named_parameters(recurse=False)}
            self._paths += [f"{prefix}{name}" for name, inside in parts.items() if not inside & kept]

    def __contains__(self, name: str) -> bool:
        """Whether a parameter or buffer of the model is of these parts."""
        return any(name == path or name.startswith(f"{path}.") for path in self._paths)

    def drop(self) -> None:
        """Let go of them."""
        for path in self._paths:
            parent, _, name = path.rpartition(".")
            delattr(self._module.get_submodule(parent), name)
