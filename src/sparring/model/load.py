"""Loading of a checkpoint folder as a `CausalModel`: transformers' module, our attention, exact or fast numerics."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from sparring.errors import BadInput, boundary, refusal
from sparring.kernels import ops
from sparring.kernels.packed import packed_later
from sparring.model.attention import IMPLEMENTATION
from sparring.model.causal import ATTENTION, CausalModel, forward_of, kv_heads_of
from sparring.model.decoder import FAMILY
from sparring.model.library import NonTextParts, class_of, classes_named, head_of
from sparring.model.lora import Adapter
from sparring.model.peft import base_of, is_adapter, read
from sparring.model.recurrent import split
from sparring.model.self_test import verify_against_library
from sparring.model.swap import swap
from sparring.observe.wait_reports import waiting

# a progress bar on stderr would tear the live view
transformers.utils.logging.disable_progress_bar()

FAST_ONLY = {"linear_attention", "moe", "mlp"}
"""Kinds of layers that only fast numerics serve, computed by transformers: layers with a recurrent state, or without
attention."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

HEADS = {
    "tokens": ("a language model", "name the language model that it was trained from"),
    "scalar": (
        "a checkpoint with a scalar head (ForSequenceClassification, one label)",
        "train one: stage reward_model",
    ),
    "new scalar": ("a language model, to add a scalar head to", "name the language model that it was trained from"),
    "own": ("a language model, or a reward model or critic with one label", "choose another model"),
}
"""Heads that a caller may ask for: the kind of checkpoint with this head, and advice for any other checkpoint."""


def load(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    numerics: str = "exact",
    head: str = "tokens",
    gradient_checkpointing: bool = False,
    packs: bool = True,
) -> CausalModel:
    """Load any Hugging Face causal LM for training or generation, or with a scalar head. Dropout is off. A multimodal
    model is reduced to its text part.

    Args:
        path: checkpoint folder or hub name; or an adapter folder, which is loaded with its base and applied to every
            row.
        dtype: "float32" or "bfloat16".
        numerics: "exact": a row's bits do not depend on the batch, or the model is refused; "fast": our compiled layers
            if available, otherwise transformers' own, without any guarantee of bits.
        head: "tokens"; "scalar": one number per row, from a sequence classifier checkpoint with one label; "new
            scalar": the same, initialised to zero, for a language model; "own": the one that the checkpoint has.
        packs: False if `refresh` packs the weights of a Llama-family decoder later.

    Raises:
        BadInput: there is no model at `path`, or one with another head, or it cannot run with these numerics.
    """
    with waiting(f"the model {path} to load"):
        module = module_of(path, dtype=dtype, device=device, numerics=numerics, head=head)
        return equipped(module, path, numerics, gradient_checkpointing, packs=packs)


def without_weights(path: str | Path, *, dtype: str, numerics: str, device: str = "cpu") -> CausalModel:
    """Make the model of a checkpoint folder that lacks its weights: its weights are random until others are loaded. No
    code of the checkpoint is run.

    Raises:
        BadInput: there is no config at `path`, or its model cannot run with these numerics.
    """
    config = read_config(str(path), numerics, "tokens")
    with boundary(BadInput, str(path), "a config of a causal LM", "check the checkpoint"):
        module = class_of(config).from_config(
            config, dtype=DTYPES[dtype], attn_implementation=IMPLEMENTATION, trust_remote_code=False
        )
    return build_model(module.to(device), str(path), numerics=numerics)


def module_of(
    path: str | Path, *, dtype: str = "float32", device: str = "cpu", numerics: str = "exact", head: str = "tokens"
) -> transformers.PreTrainedModel:
    """Load transformers' module with its weights, before any part is replaced.

    Raises:
        BadInput: there is no model at `path`, or its config shows that it cannot run with these numerics.
    """
    where = base_of(path)
    if dtype not in DTYPES:
        raise refusal("dtype", f"one of {sorted(DTYPES)}", repr(dtype), "choose one of them")
    if numerics not in ("exact", "fast"):
        raise refusal("numerics", "'exact' or 'fast'", repr(numerics), "choose one of them")
    if head not in HEADS:
        raise refusal("head", f"one of {sorted(HEADS)}", repr(head), "choose one of them")
    config = read_config(where, numerics, head)
    scalar = head == "new scalar" or head_of(config) == "scalar"
    found_in = transformers.AutoModelForSequenceClassification if scalar else class_of(config)
    with (
        _without_report(),
        boundary(BadInput, where, "a checkpoint that the library loads", "repair it or take another"),
    ):
        module, report = found_in.from_pretrained(
            where,
            dtype=DTYPES[dtype],
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' own error does not name the parameters
            **({"num_labels": 1} if scalar else {}),
        )
    if head == "new scalar":
        report = {name: {key for key in keys if "score.weight" not in key} for name, keys in report.items()}
        nn.init.zeros_(module.score.weight)
    refuse_incomplete(where, report["missing_keys"], report["mismatched_keys"])
    loaded: transformers.PreTrainedModel = module.to(device)
    return loaded


def equipped(
    module: transformers.PreTrainedModel,
    path: str | Path,
    numerics: str,
    gradient_checkpointing: bool = False,
    *,
    packs: bool = True,
) -> CausalModel:
    """Build the model of a loaded module; if `path` is an adapter folder, apply the adapter to every row."""
    model = build_model(
        module, base_of(path), numerics=numerics, gradient_checkpointing=gradient_checkpointing, packs=packs
    )
    if is_adapter(path):
        model.adapters.everywhere = model.adapters.fit(Adapter(read(path), model.dtype, model.device))
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' table of missing weights: `refuse_incomplete` reports them in one line."""
    reporter = logging.getLogger("transformers.modeling_utils")
    # a filter, since transformers reads the logger's level to decide on other messages
    reporter.addFilter(_is_error)
    try:
        yield
    finally:
        reporter.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def build_model(
    module: transformers.PreTrainedModel,
    where: str,
    *,
    numerics: str,
    gradient_checkpointing: bool = False,
    packs: bool = True,
) -> CausalModel:
    """Replace parts of transformers' module by ours, and verify the result for models that our own tests do not cover.
    On torch's meta device nothing is verified: the model gets the parts that a verified one would have.

    Raises:
        BadInput: the model cannot run with these numerics.
    """
    config, exact = module.config, numerics == "exact"
    module.eval()
    _switch_dropout_off(module)
    max_positions = _max_positions(config)
    # without compiled kernels transformers' layers are faster
    device = _device_of(module)
    path_name = ops.path_name(device)
    swapped = exact or ops.is_compiled(device)
    with boundary(BadInput, where, "a causal LM that calls the library's interfaces", "choose another model"):
        kv_heads = kv_heads_of(module) if device == "meta" else {}
        with boundary(BadInput, where, "recurrent layers that go on from a cache of states", "choose another model"):
            recurrent = {} if exact else split(module)
        has_own_layers = swapped and swap(module, max_positions, exact=exact)
        # the lean decoder has one activation; models with another use transformers' forward
        lean = has_own_layers and config.model_type in FAMILY and config.hidden_act in ("silu", "swish")
        with nullcontext() if packs else packed_later():
            forward = forward_of(
                module, lean=lean, exact=exact, gradient_checkpointing=gradient_checkpointing, recurrent=recurrent
            )
        model = CausalModel(module, forward, path_name=path_name if exact else "fast", max_positions=max_positions)
        if device == "meta":
            model.kv_heads = kv_heads
        elif not lean:
            verify_against_library(model, where, exact=exact)
        if not lean:
            NonTextParts(module).drop()
    return model


def read_config(where: str, numerics: str, head: str) -> Any:
    """Read the transformers config of a checkpoint, and check its head and whether these numerics can run its model.

    Raises:
        BadInput: the config is missing, or its model has another head or cannot run with these numerics.
    """
    looks_local = where.startswith((".", "/", "~")) or where.count("/") > 1
    if (Path(where).is_dir() or looks_local) and not (Path(where) / "config.json").is_file():
        given = "a folder without one" if Path(where).is_dir() else "no such folder"
        raise refusal(where, "a checkpoint folder with config.json", given, "check the model's path")
    with boundary(BadInput, f"{where}/config.json", "a config of a Hugging Face model", "check the model's path"):
        config = transformers.AutoConfig.from_pretrained(where)
    _refuse_other_head(where, config, head)
    _refuse_unservable(where, config, numerics)
    return config


def _refuse_other_head(where: str, config: Any, head: str) -> None:
    """Refuse a model that transformers would load without its own head, or with a random head."""
    found, named = head_of(config), " and ".join(classes_named(config)) or "no class (architectures)"
    if found == "scalar" and config.num_labels == 1:
        named += ", a reward model or critic"
    elif found == "scalar":
        found, named = "", f"{named} with {config.num_labels} labels"
    wanted = {"new scalar": "tokens", "own": found}.get(head, head)
    if found and found == wanted:
        return
    expected, remedy = HEADS[head]
    remedy = remedy if found or config.architectures else "write the class of the model there"
    raise refusal(f"{where}/config.json", expected, named, remedy)


def refuse_incomplete(where: str, missing: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse a checkpoint that transformers would silently complete with random weights: BadInput if a parameter is
    missing, or does not fit. `mismatched` has (name, shape in the file, shape by the config) of each misfit."""
    absent, remedy = sorted(missing), "take the whole checkpoint, or the config that belongs to it"
    if absent:
        raise refusal(
            where, "all weights of its config", f"none for {', '.join(absent[:3])} ({len(absent)} in all)", remedy
        )
    for name, given, expected in sorted(mismatched):
        raise refusal(where, f"{name} of shape {list(expected)}, as its config says", str(list(given)), remedy)


def _refuse_unservable(where: str, config: Any, numerics: str) -> None:
    others = set(getattr(config.get_text_config(), "layer_types", None) or ()) - ATTENTION
    if not others or (numerics == "fast" and others <= FAST_ONLY):
        return
    given = f"a {config.model_type} model, with {sorted(others - FAST_ONLY or others)[0]} layers"
    remedy = 'set numerics = "fast" for this model' if others <= FAST_ONLY else "choose a model without them"
    raise refusal(where, "full or sliding attention in every layer", given, remedy)


def _device_of(module: nn.Module) -> str:
    return next(module.parameters()).device.type


def _max_positions(config: Any) -> int:
    positions: int = config.get_text_config().max_position_embeddings
    return positions


def _switch_dropout_off(module: nn.Module) -> None:
    """Set dropout to 0, so that it is off even under `train()`, which transformers needs for gradient checkpointing."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and any(word in name for word in ("dropout", "layerdrop", "jitter_noise")):
                setattr(part, name, 0.0)
