"""Adapter folders as the PEFT library writes and reads them. Only what touches tensors imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.errors import BadInput, boundary, refusal
from sparring.model.config import LoraConfig

if TYPE_CHECKING:
    import torch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before a layer's name in the file."""

UNSERVED = (
    *("modules_to_save", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "fan_in_fan_out", "target_parameters"),
    *("trainable_token_indices", "layer_replication", "megatron_config", "corda_config", "use_qalora", "alora_invocation_tokens"),
)
"""Settings of that library under which an adapter is more, or something else, than two factors a layer and one scale."""


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter in place of a model."""
    return (Path(path) / CONFIG).is_file()


def base_of(path: str | Path) -> str:
    """The checkpoint that an adapter folder was trained on; of any other path, the path itself.

    Raises:
        BadInput: the folder does not say.
    """
    if not is_adapter(path):
        return str(path)
    base = _settings(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        expected = "the checkpoint it was trained on in base_model_name_or_path"
        raise refusal(f"{path}/{CONFIG}", expected, repr(base), "write it there")
    return base


def read_config(path: str | Path) -> LoraConfig:
    """The settings of an adapter folder.

    Raises:
        BadInput: it holds another kind of adapter, or one that we cannot serve.
    """
    settings, where = _settings(path), f"{path}/{CONFIG}"
    if settings.get("peft_type") != "LORA":
        raise refusal(where, "peft_type 'LORA'", repr(settings.get("peft_type")), "train another adapter")
    for name in UNSERVED:
        if settings.get(name):
            raise refusal(where, f"no {name}", json.dumps(settings[name])[:80], "merge that adapter into its base")
    if settings.get("bias", "none") != "none":
        raise refusal(where, 'bias "none"', repr(settings["bias"]), "merge that adapter into its base")
    targets = settings.get("target_modules")
    with boundary(BadInput, where, "rank, alpha and target_modules of an adapter", "repair it"):
        return LoraConfig(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            # a pattern, which names what the tensors name anyway
            target_modules=tuple(sorted(targets)) if isinstance(targets, list) else "all-linear",
            rslora=bool(settings.get("use_rslora")),
        )


def read(path: str | Path) -> dict[str, torch.Tensor]:
    """The state of an adapter folder, as `model.lora.Adapter` takes it.

    Raises:
        BadInput: as `read_config`; or it has no tensors, or others than factors.
    """
    import torch
    from safetensors.torch import load_file

    from sparring.model.lora import SCALE

    config, file = read_config(path), Path(path) / TENSORS
    if not file.is_file():
        raise refusal(str(path), f"{TENSORS}", "none", "copy the whole adapter")
    with boundary(BadInput, str(file), "a safetensors file", "copy the adapter again"):
        tensors = load_file(file)
    strange = sorted(name for name in tensors if not name.startswith(PREFIX))
    if strange:
        raise refusal(str(file), f"names that begin with {PREFIX}", strange[0], "save it with the PEFT library's save_pretrained")
    state = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return {**state, SCALE: torch.tensor(config.scale, dtype=torch.float64)}


def write(state: Mapping[str, torch.Tensor], config: LoraConfig, base: str | Path, out: str | Path) -> Path:
    """Write an adapter folder: the two files that the PEFT library reads.

    Args:
        state: of a `model.lora.Adapter`.
        config: whose rank and scale it has.
        base: the checkpoint (a folder or a hub name) that it was trained on.
        out: folder to write; made when missing.
    """
    from safetensors.torch import save_file

    from sparring.model.lora import SCALE

    folder, base = Path(out), Path(base).absolute() if Path(base).is_dir() else base
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items() if name != SCALE}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    layers = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return folder


def _settings(path: str | Path) -> dict[str, Any]:
    file = Path(path) / CONFIG
    with boundary(BadInput, str(file), "the settings of an adapter", "copy the adapter again"):
        settings = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise refusal(str(file), "a JSON object", type(settings).__name__, "copy the adapter again")
    return settings
