"""Models that learn beside the policy in the rl stage: where their sections belong, and what is left of
it."""

from __future__ import annotations

from pathlib import Path

from sparring.algo.base import name_of
from sparring.algo.rules import credits_with
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.protocols import Trainer
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import Context


def check_asked(config: RunConfig, role: str, annotation: Annotation, preset: str) -> bool:
    """Return whether the run has `[rl.<role>]`: where the stage rl runs with a credit that reads `annotation`.

    Args:
        role: the section's name.
        annotation: the annotation that the section's model writes.
        preset: of `[algo]`, that has it.

    Raises:
        BadInput: it is missing, or there without being asked.
    """
    if "rl" not in config.run.stages:
        return False
    configured = getattr(config.rl, role) is not None
    wanted = config.rl.preference is None and config.algo.reads(annotation)
    credit = " or ".join(repr(name) for name in credits_with(lambda rule: annotation in rule.reads))
    if wanted and not configured:
        raise refusal(f"rl.{role}", f"a table, which credit {credit} needs", "none", f"write [rl.{role}]")
    if configured and not wanted:
        got = "rl.preference" if config.rl.preference is not None else f"credit {name_of(config.algo.credit)!r}"
        do = f'leave it out, or set [algo] preset = "{preset}"'
        raise refusal(f"rl.{role}", f"no table, because only credit {credit} uses it", got, do)
    return configured


async def write_learned(context: Context, trainer: Trainer, role: str, began: Path) -> str:
    """Write what a model beside the policy has become, which began as the folder `began`, as one that another run may
    begin with.

    Returns:
        The folder.
    """
    from sparring.stages.models.written import write_model

    folder = context.folder / "rl" / role
    await write_model(trainer, began, folder)
    return str(folder)
