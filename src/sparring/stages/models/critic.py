"""The critic of the rl stage: its trainer, its first checkpoint and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.model.hub import model_folder
from sparring.observe.hooks import prefixed
from sparring.protocols import Cluster, Trainer, TrainPlan
from sparring.recipe.sections.rl import CriticConfig
from sparring.stages.context import POLICY, RunFiles, given_checkpoint
from sparring.stages.models.auxiliary import check_section
from sparring.stages.models.reward_scorers import checkpoint_of

CRITIC = "critic"
"""Role of the critic on batches and checkpoints."""
OWN = "reward_model"
"""Stage whose output `rl.critic.model` may name."""
LEAST_SPREAD = 1e-12
"""Minimum variance of returns, as a share of their mean square, for which explained variance is computed."""


def open_critic(section: CriticConfig, cluster: Cluster, folder: Path, total_steps: int) -> Trainer:
    """Return the trainer of the critic, which begins as the checkpoint `folder`."""
    from sparring.algo.loss.value import ValueLoss
    from sparring.model.library import head_of
    from sparring.model.load import read_config

    plan = TrainPlan(
        losses=[ValueLoss(clip=section.clip)],
        total_steps=total_steps,
        overrides=section.train,
        head="scalar" if head_of(read_config(str(folder), "fast", "own")) == "scalar" else "new scalar",
        role=CRITIC,
    )
    numerics_of = POLICY if section.model == OWN else section.model
    trainer = cluster.trainer(numerics_of, path=str(folder), plan=plan)
    return prefixed(trainer, CRITIC, with_explained_variance)


def critic_folder(files: RunFiles, name: str, source: Path) -> Path:
    """Return the checkpoint folder that the critic begins as.

    Args:
        name: `[rl.critic] model`.
        source: checkpoint folder that the policy begins as.

    Raises:
        BadInput: there is no such checkpoint.
    """
    if name == POLICY:
        return source
    return files.output(OWN) if name == OWN else model_folder(files.config.models[name])


def check_critic(files: RunFiles) -> list[str]:
    """Refuse a missing or superfluous `[rl.critic]`, and a critic that cannot read the policy's tokens."""
    section = files.config.rl.critic
    if not check_section(files.config, CRITIC, Annotation.VALUE, "ppo") or section is None:
        return []
    _check_model(files, section.model)
    warmup = f"; learns alone through {section.warmup_steps} updates" if section.warmup_steps else ""
    return [f"rl: a critic that begins as {section.model}{warmup}"]


def _check_model(files: RunFiles, name: str) -> None:
    models, where = files.config.models, "rl.critic.model"
    if name == POLICY:
        if models[POLICY].lora is not None:
            do = "name a model of [models] with the base's path"
            raise refusal(
                where, "weights without an adapter, to add a scalar head to", "the policy, which trains an adapter", do
            )
        return
    if name == OWN:
        if OWN not in files.config.run.stages and files.done(OWN) is None:
            stages = str(list(files.config.run.stages))
            raise refusal(where, f"a stage {OWN} before rl", stages, "add it, or name another model")
        return
    checkpoint_of(files.config, where, name, (POLICY, OWN), given_checkpoint(files.config), head="own")


def with_explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the critic's metrics of a batch, with the explained variance of the returns instead of the sums that it is
    computed from."""
    rest = dict(metrics)
    sums = {name: rest.pop(name) for name in ("return_square", "error", "error_square") if name in rest}
    variance = explained_variance(rest["return"], **sums) if sums else None
    return rest if variance is None else {**rest, "explained_variance": variance}


def explained_variance(mean: float, *, return_square: float, error: float, error_square: float) -> float | None:
    """Return 1 - variance of the error / variance of the return, or None for constant returns.

    It is 1 for a perfect critic, 0 for a critic with a constant value, and negative for a worse critic.

    Args:
        mean: mean return.
        return_square: mean square of the return.
        error: mean of return - value.
        error_square: mean square of return - value.
    """
    spread = return_square - mean**2
    return None if spread <= LEAST_SPREAD * return_square else 1.0 - (error_square - error**2) / spread
