"""The export stage: a plain Hugging Face checkpoint folder that other tools load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparring.model.hub import base_folder
from sparring.model.peft import base_of, is_adapter, read
from sparring.protocols import Store
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import Context
from sparring.stages.models.exported_format import write_format
from sparring.stages.models.weight_files import write_beside
from sparring.stages.runtime.checkpoint_choice import chosen_weights


async def run(context: Context) -> dict[str, Any]:
    """Copy the last trained policy, its best or last weights (`[export] weights`), to `<run>/export`, in `[export]
    dtype` and with a chat template that writes the run's prompts.

    Returns:
        `model`: the folder; `bytes`: its size.
    """
    context.sink.start("export", 1)
    source, stage = context.input("export"), context.before("export")
    if stage is not None:
        source, which = chosen_weights(context, stage, context.config.export.weights)
        if which:
            context.sink.event("export", which)
    out = context.folder / "export"
    for line in export_folder(source, out, context.config.export.dtype, (context.config, context.store)):
        context.sink.event("export", line)
    return {"model": str(out), "bytes": sum(file.stat().st_size for file in out.iterdir())}


def export_folder(source: Path, out: Path, dtype: str, run: tuple[RunConfig, Store] | None = None) -> list[str]:
    """Write a checkpoint as a Hugging Face folder, whole or not at all, with the checkpoint's own head; an adapter is
    merged into its base. Return sentences about the chat format.

    Args:
        run: recipe and record of the run that trained `source`, for its chat format; None: the source's own format.
    """
    from sparring.model.load import load
    from sparring.model.lora import Adapter
    from sparring.model.save import save
    from sparring.model.targets import targets_of

    model = load(base_of(source), dtype=dtype, device="cpu", numerics="fast", head="own")
    state = model.state()
    if is_adapter(source):
        state = Adapter(read(source), model.dtype, model.device).merged(state, targets_of(model.module))
    findings: list[str] = []

    def written(to: Path) -> None:
        save(state, base_folder(source), to)
        if run is not None:
            findings.extend(write_format(to, base_folder(source), *run))

    write_beside(out, written)
    return findings
