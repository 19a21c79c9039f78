"""The sft stage: supervised fine-tuning on demonstrations, in packed rows, with loss on assistant tokens only."""

from __future__ import annotations

from typing import Any

from sparring.batch.demonstration import demonstration, demonstration_batch
from sparring.errors import refusal
from sparring.protocols import TrainPlan
from sparring.stages.context import POLICY, Context, renderer_of
from sparring.stages.data.demonstrations import demonstrations
from sparring.stages.models.adapters import trained_folder
from sparring.stages.models.context_length import outline_of
from sparring.stages.runtime.offline import supervise


async def run(context: Context) -> dict[str, Any]:
    """Fine-tune the stage's input on demonstrations and write a Hugging Face or adapter folder.

    Returns:
        `rows` (distinct demonstrations), `tokens_trained`, `loss` of the last step and `model`, the folder.
    """
    from sparring.algo.loss.imitate import ImitateLoss

    config = context.config.sft
    source = trained_folder(context, context.input("sft"))
    renderer, longest = renderer_of(context.config, source), outline_of(source).max_positions
    conversations = await demonstrations(context, renderer, longest)
    rows = [demonstration(rendered.tokens, rendered.sampled, name) for name, rendered in conversations]
    if not rows:
        raise refusal(
            "sft", "at least one demonstration", "none", "add rows to [sft] data, or demonstrations to the environment"
        )
    plan = TrainPlan(losses=[ImitateLoss()], total_steps=config.steps, overrides=config.train)
    trainer = context.cluster.trainer(POLICY, path=str(source), plan=plan)
    totals = await supervise(context, "sft", trainer, source, rows, demonstration_batch, {"loss": "loss_imitate"})
    return {"rows": len(rows), **totals}
