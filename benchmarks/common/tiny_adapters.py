"""Random adapters of a tiny model that change every row, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def tiny_adapter(
    base: str | Path,
    out_path: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    target_modules: str | Sequence[str] = "all-linear",
    target_parameters: Sequence[str] = (),
) -> Path:
    """Write an adapter folder for the checkpoint `base` and return it. `seed` draws both factors; the others are
    settings of `LoraConfig`."""
    import torch

    from sparring.model.config import LoraConfig
    from sparring.model.lora import SCALE, fresh_state
    from sparring.model.peft import write
    from sparring.model.save import skeleton
    from sparring.model.targets import targeted

    named = target_modules if isinstance(target_modules, str) else tuple(target_modules)
    stacks = tuple(target_parameters)
    config = LoraConfig(rank=rank, alpha=2.0 * rank, target_modules=named, target_parameters=stacks)
    module = skeleton(base)
    state = fresh_state(module, targeted(module, named, stacks), rank, config.scale, seed)
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(state.keys() - {SCALE}):
        state[name].normal_(0.0, 0.2, generator=generator)
    return write(state, config, base, out_path)
