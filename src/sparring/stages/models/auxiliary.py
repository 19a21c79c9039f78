"""Sections of the rl stage that add a trained model to the policy: `[rl.critic]` and `[rl.implicit]`."""

from __future__ import annotations

from sparring.algo.base import name_of
from sparring.algo.rules import credits_with
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.recipe.run_config import RunConfig


def check_section(config: RunConfig, role: str, annotation: Annotation, preset: str) -> bool:
    """Return whether the run has `[rl.<role>]`. The section must be present if the rl stage runs with a credit rule
    that reads `annotation`, and absent otherwise.

    Args:
        role: name of the section.
        annotation: annotation that the section's model writes.
        preset: preset of `[algo]` that needs the section.

    Raises:
        BadInput: the section is missing or superfluous.
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
