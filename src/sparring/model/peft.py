"""Adapter folders in the form that the PEFT library writes and reads. torch is imported only by the functions that
handle tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparring.errors import BadInput, boundary, refusal
from sparring.model.config import STACKED, LoraConfig

if TYPE_CHECKING:
    import torch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of a layer's name in the file."""
EXPERTS, INNER = "experts", "base_layer"
"""Name of the module of experts, and of the inner of PEFT's two wrappers around it: if both parameters of the experts
have factors, the first parameter's belong to the inner wrapper."""

UNSERVED = (
    *("modules_to_save", "use_dora", "lora_bias"),
    *(
        "trainable_token_indices",
        "layer_replication",
        "megatron_config",
        "corda_config",
        "use_qalora",
        "alora_invocation_tokens",
    ),
)
"""Settings of PEFT under which an adapter is more than two factors per layer and one scale."""


def is_adapter(path: str | Path) -> bool:
    """Return True if a folder holds an adapter instead of a model."""
    return (Path(path) / CONFIG).is_file()


def base_of(path: str | Path) -> str:
    """Return the checkpoint that an adapter was trained on; for any other path, the path itself. Raises BadInput if the
    adapter folder does not name its base."""
    if not is_adapter(path):
        return str(path)
    base = _settings(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        expected = "the checkpoint it was trained on in base_model_name_or_path"
        raise refusal(f"{path}/{CONFIG}", expected, repr(base), "write it there")
    return base


def read_config(path: str | Path) -> LoraConfig:
    """Read the settings of an adapter folder. Raises BadInput if the adapter is no LoRA adapter, or has a setting that
    is not supported."""
    settings, where = _settings(path), f"{path}/{CONFIG}"
    if settings.get("peft_type") != "LORA":
        raise refusal(where, "peft_type 'LORA'", repr(settings.get("peft_type")), "train another adapter")
    for name in UNSERVED:
        if settings.get(name):
            raise refusal(where, f"no {name}", json.dumps(settings[name])[:80], "merge that adapter into its base")
    if settings.get("bias", "none") != "none":
        raise refusal(where, 'bias "none"', repr(settings["bias"]), "merge that adapter into its base")
    targets, stacks = settings.get("target_modules"), tuple(sorted(settings.get("target_parameters") or ()))
    if strange := [name for name in stacks if name.rpartition(".")[2] not in STACKED]:
        remedy = "merge that adapter into its base"
        raise refusal(where, f"target_parameters that end in {' or '.join(STACKED)}", repr(strange[0]), remedy)
    with boundary(BadInput, where, "rank, alpha and target_modules of an adapter", "repair it"):
        return LoraConfig(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            # a pattern is not needed: the tensors name the same layers
            target_modules=tuple(sorted(targets)) if isinstance(targets, list) else "all-linear",
            target_parameters=stacks,
            rslora=bool(settings.get("use_rslora")),
        )


def read(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the state of an adapter folder, as `model.lora.Adapter` takes it.

    Raises:
        BadInput: as `read_config`; or the folder has no tensors, or tensors that are no factors.
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
        raise refusal(
            str(file), f"names that begin with {PREFIX}", strange[0], "save it with the PEFT library's save_pretrained"
        )
    state = _by_parameter({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, path)
    return {**state, SCALE: torch.tensor(config.scale, dtype=torch.float64)}


def _by_parameter(state: Mapping[str, torch.Tensor], path: str | Path) -> dict[str, torch.Tensor]:
    """Name factors of stacked experts by their parameter, A [E, R, K] and B [E, M, R]; names of linear layers stay.

    PEFT wraps the module of the experts once for each of their parameters, and stores the factors of E experts as A [E
    R, K] and B [M, R E].
    """
    config, settings, factors = read_config(path), _settings(path), {}
    for name, tensor in state.items():
        layer, _, factor = name.rpartition(".lora_")
        if factor not in ("A.weight", "B.weight"):
            remedy = "merge that adapter into its base"
            raise refusal(f"{path}/{TENSORS}", "factors of linear layers and of experts alone", name, remedy)
        module = layer.removesuffix(f".{INNER}")
        matches = [one for one in STACKED if _matches(config.target_parameters, f"{module}.{one}")]
        stacked = bool(matches) and module.rpartition(".")[2] == EXPERTS
        target = f"{module}.{matches[0] if module != layer else matches[-1]}" if stacked else layer
        rank = _rank(target, config, settings, f"{path}/{CONFIG}")
        along = tensor.shape[1 if factor.startswith("B") else 0] if tensor.dim() == 2 else 0
        if along % rank or not along or (along != rank and not stacked):
            given = f"{list(tensor.shape)} in {name}"
            raise refusal(
                f"{path}/{TENSORS}", f"factors of rank {rank}, as the settings say", given, "copy both files again"
            )
        if stacked and factor.startswith("B"):
            tensor = tensor.view(-1, rank, along // rank).permute(2, 0, 1)
        elif stacked:
            tensor = tensor.view(along // rank, rank, -1)
        factors[f"{target}.lora_{factor}"] = tensor.contiguous()
    return factors


def _matches(targets: Sequence[str], name: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _rank(target: str, config: LoraConfig, settings: Mapping[str, Any], where: str) -> int:
    """Return the rank of the factors of a layer or parameter; refuse a scale that differs from the config's."""
    with boundary(BadInput, where, "rank_pattern and alpha_pattern: numbers by regular expressions", "repair it"):
        patterns = [settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
        matching = [next((v for key, v in p.items() if re.match(rf"(.*\.)?({key})$", target)), None) for p in patterns]
        rank, alpha = int(matching[0] or config.rank), float(matching[1] or config.alpha)
        scale = msgspec.structs.replace(config, rank=rank, alpha=alpha).scale
    if not math.isclose(scale, config.scale):
        expected = f"rank_pattern and alpha_pattern of one scale, {config.scale:g}"
        given = f"rank {rank} and alpha {alpha:g} for {target}"
        raise refusal(where, expected, given, "merge that adapter into its base")
    return rank


def _patterns(state: Mapping[str, torch.Tensor], config: LoraConfig) -> dict[str, dict[str, float]]:
    """Return the ranks that differ from the config's, and the alphas that give them the config's scale."""
    ranks = {name.rpartition(".lora_")[0]: tensor.shape[-1] for name, tensor in state.items() if ".lora_B" in name}
    others = {re.escape(name): rank for name, rank in ranks.items() if rank != config.rank}
    alphas = {name: config.scale * (rank**0.5 if config.rslora else rank) for name, rank in others.items()}
    return {"rank_pattern": {**others}, "alpha_pattern": alphas} if others else {}


def _by_module(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name each factor as in the file: the inverse of `_by_parameter`."""
    factors = {}
    for name, tensor in state.items():
        path, _, factor = name.rpartition(".lora_")
        if tensor.dim() == 3:
            module, _, parameter = path.rpartition(".")
            both = all(f"{module}.{one}.lora_{factor}" in state for one in STACKED)
            path = f"{module}.{INNER}" if both and parameter == STACKED[0] else module
            tensor = tensor.permute(1, 2, 0).flatten(1) if factor.startswith("B") else tensor.flatten(0, 1)
        factors[f"{PREFIX}{path}.lora_{factor}"] = tensor.detach().cpu().contiguous()
    return factors


def write(state: Mapping[str, torch.Tensor], config: LoraConfig, base: str | Path, out: str | Path) -> Path:
    """Write an adapter folder, created if missing: the two files that PEFT reads.

    Args:
        state: state of a `model.lora.Adapter`.
        base: checkpoint (a folder or a hub name) that the adapter was trained on.
    """
    from safetensors.torch import save_file

    from sparring.model.lora import SCALE
    from sparring.model.save import share

    folder, base = Path(out), Path(base).absolute() if Path(base).is_dir() else base
    folder.mkdir(parents=True, exist_ok=True)
    factors = {name: tensor for name, tensor in state.items() if name != SCALE}
    save_file(_by_module(factors), folder / TENSORS, metadata={"format": "pt"})
    layers = sorted({name.rpartition(".lora_")[0] for name, tensor in factors.items() if tensor.dim() == 2})
    stacks = sorted({name.rpartition(".lora_")[0] for name, tensor in factors.items() if tensor.dim() == 3})
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
        **({"target_parameters": stacks} if stacks else {}),
        **_patterns(factors, config),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    share(folder)
    return folder


def _settings(path: str | Path) -> dict[str, Any]:
    file = Path(path) / CONFIG
    with boundary(BadInput, str(file), "the settings of an adapter", "copy the adapter again"):
        settings = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise refusal(str(file), "a JSON object", type(settings).__name__, "copy the adapter again")
    return settings
