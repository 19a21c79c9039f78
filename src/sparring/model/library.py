"""Classes of transformers: the one that loads a checkpoint, and its submodule that computes text."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

# transformers' own handler writes to standard error as it was at import; its messages go to the root logger instead
transformers.utils.logging.disable_default_handler()
transformers.utils.logging.enable_propagation()

SCALAR = "ForSequenceClassification"
"""End of the names of classes with a scalar head."""
LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes with a head over tokens."""


def class_of(config: Any) -> Any:
    """Return the transformers class of a causal LM; for a multimodal model, the class over all its inputs."""
    several = transformers.AutoModelForImageTextToText
    composite = config.get_text_config() is not config and type(config) in several._model_mapping
    return several if composite else transformers.AutoModelForCausalLM


def classes_named(config: Any) -> list[str]:
    """Return the names of the classes that a config names (`architectures`)."""
    named = config.architectures or ()
    return [named] if isinstance(named, str) else [str(name) for name in named]


def head_of(config: Any) -> str:
    """Return the head of a checkpoint by the class that its config names (`architectures`): "tokens" for a language
    model, "scalar" for a reward model or critic, "" for anything else."""
    names = classes_named(config) or [""]
    if all(name.endswith(SCALAR) for name in names):
        return "scalar"
    known = type(config) in class_of(config)._model_mapping and all(name.endswith(LANGUAGE) for name in names)
    return "tokens" if known else ""


def text_model(module: transformers.PreTrainedModel) -> nn.Module:
    """Return the submodule between tokens and head: the language model of a multimodal model, otherwise the base
    model."""
    composite = module.config.get_text_config() is not module.config
    decoder: nn.Module = module.get_decoder() if composite else module.base_model
    return decoder


class NonTextParts:
    """Names of vision and audio submodules; empty for text-only models."""

    def __init__(self, module: transformers.PreTrainedModel) -> None:
        self._module, text = module, text_model(module)
        text_parts = {text, module.get_output_embeddings(), getattr(module, "score", None)}
        self._paths: list[str] = []
        bases = {"": module, f"{module.base_model_prefix}.": module.base_model}
        for prefix, parent in bases.items() if text is not module.base_model else ():
            parts = {name: {*part.modules()} for name, part in parent.named_children()}
            parts |= {name: set() for name, _ in parent.named_parameters(recurse=False)}
            self._paths += [f"{prefix}{name}" for name, inside in parts.items() if not inside & text_parts]

    def __contains__(self, name: str) -> bool:
        """Return True if a parameter or buffer belongs to these parts."""
        return any(name == path or name.startswith(f"{path}.") for path in self._paths)

    def drop(self) -> None:
        """Delete the vision and audio submodules."""
        for path in self._paths:
            parent, _, name = path.rpartition(".")
            delattr(self._module.get_submodule(parent), name)
