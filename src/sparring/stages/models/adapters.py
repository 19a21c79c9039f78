"""Adapters that a stage starts from: the output of the stage before, or a fresh one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.model.config import LoraConfig
from sparring.model.peft import base_of, is_adapter, read, read_config, write
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import NON_POLICY_STAGES, POLICY, RunFiles, given_checkpoint
from sparring.stages.models.weight_files import write_beside

ALONE = {"vllm": "vLLM", "openai": "an OpenAI-compatible server"}
"""Engines that serve a model without adapters, by kind, with their names in messages."""


TRAINED, START = "lora", "lora_start"
"""Folders of a run: the adapter that was trained last, and the untrained one that training started from."""


def trained_folder(files: RunFiles, source: Path) -> Path:
    """Return the folder that a stage trains and serves.

    That is its input `source`, unless the run trains adapters and `source` is a whole model: then it is
    `<run>/lora_start`, a fresh adapter for `source`.
    """
    lora = files.config.models[POLICY].lora
    if lora is None or is_adapter(source):
        return source
    out = files.folder / START
    if not out.exists():
        write_beside(out, lambda to: write(fresh(source, lora, files.config.run.seed), lora, source, to))
    return out


def show_adapter(files: RunFiles, stage: str) -> None:
    """Copy a stage's output adapter into `<run>/lora`, whole or not at all. An untrained adapter is not copied."""
    written = files.output(stage)
    if stage in NON_POLICY_STAGES or not written.is_relative_to(files.folder):
        return
    if not is_adapter(written) or _is_untrained(written):
        return
    write_beside(files.folder / TRAINED, lambda to: shutil.copytree(written, to))


def _is_untrained(folder: Path) -> bool:
    return not any(bool(tensor.any()) for name, tensor in read(folder).items() if ".lora_B" in name)


def fresh(base: Path, lora: LoraConfig, seed: int) -> dict[str, Any]:
    """Return the state of an untrained adapter for the checkpoint folder `base`, without reading its weights."""
    from sparring.model.lora import fresh_state
    from sparring.model.save import skeleton
    from sparring.model.targets import targeted

    module = skeleton(base)
    return fresh_state(
        module, targeted(module, lora.target_modules, lora.target_parameters), lora.rank, lora.scale, seed
    )


def check_lora(config: RunConfig) -> list[str]:
    """Refuse adapters that the engine cannot serve, or that have other settings than the checkpoint's adapter."""
    lora, start, kind = config.models[POLICY].lora, given_checkpoint(config), config.engine.kind
    if lora is not None and kind in ALONE:
        actual, fix = f"rank {lora.rank}", 'leave it out, or set engine.kind = "native" or "remote"'
        raise refusal("models.policy.lora", f"none with {ALONE[kind]}, which serves no adapters", actual, fix)
    if start is not None and is_adapter(start):
        adapter = read_config(start)
        if lora is None:
            fix = "add it, or merge the adapter first: sparring export"
            raise refusal(
                "models.policy.lora", f"rank {adapter.rank}, as the adapter {start} has", "no such section", fix
            )
        if (lora.rank, lora.scale) != (adapter.rank, adapter.scale):
            actual = f"rank {lora.rank} and scale {lora.scale:g}"
            fix = "set rank, alpha and rslora as it was trained"
            raise refusal(
                "models.policy.lora", f"rank {adapter.rank} and scale {adapter.scale:g}, as {start} has", actual, fix
            )
        return [f"lora: goes on with the adapter {start} of {base_of(start)}"]
    if lora is None:
        return []
    parts = "all linear layers" if lora.target_modules == "all-linear" else f"target_modules {lora.target_modules}"
    experts = f", target_parameters {lora.target_parameters}" if lora.target_parameters else ""
    return [f"lora: rank {lora.rank}, scale {lora.scale:g}, {parts}{experts}"]
