"""The implicit process reward model of the rl stage (PRIME): its trainer and its checks."""

from __future__ import annotations

from pathlib import Path

from sparring.annotations import Annotation
from sparring.observe.hooks import prefixed
from sparring.protocols import Cluster, Trainer, TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.recipe.sections.rl import ImplicitConfig
from sparring.stages.context import POLICY, given_checkpoint
from sparring.stages.models.auxiliary import check_section
from sparring.stages.models.reward_scorers import checkpoint_of

IMPLICIT = "implicit"
"""Role of the model on batches and checkpoints, and the annotation with its log-probabilities."""


def open_implicit(
    section: ImplicitConfig, scale: float | None, cluster: Cluster, folder: Path, total_steps: int
) -> Trainer:
    """Return the trainer of the implicit reward model, which begins as the checkpoint `folder`.

    Args:
        scale: scale of the reward, set by the credit rule that reads it.
    """
    from sparring.algo.loss.implicit import ImplicitReward

    assert scale is not None, "check_implicit has seen the run"
    plan = TrainPlan(
        losses=[ImplicitReward(beta=scale)],
        total_steps=total_steps,
        overrides=section.train,
        role=IMPLICIT,
    )
    return prefixed(cluster.trainer(section.model, path=str(folder), plan=plan), IMPLICIT)


def check_implicit(config: RunConfig) -> list[str]:
    """Refuse a missing or superfluous `[rl.implicit]`, and a model that is no language model over the policy's
    tokens."""
    section = config.rl.implicit
    if not check_section(config, IMPLICIT, Annotation.IMPLICIT, "prime") or section is None:
        return []
    if (name := section.model) != POLICY:
        checkpoint_of(config, "rl.implicit.model", name, (POLICY,), given_checkpoint(config), head="tokens")
    return [f"rl: an implicit reward model that begins as {section.model}"]
