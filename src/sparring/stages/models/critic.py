"""The critic of the rl stage, which predicts the reward that is left: `[rl.critic]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparring.annotations import Annotation
from sparring.batch.critic import value_rows
from sparring.errors import refusal
from sparring.protocols import Loss
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, RunFiles, given_checkpoint
from sparring.stages.models.learner import Learner
from sparring.stages.models.reward_model import OWN, checkpoint_of

LEAST_SPREAD = 1e-12
"""Minimum variance of returns, as a share of their mean square, for which explained variance is computed."""


class CriticUse(Learner):
    """Use of a value model for credit gae."""

    name, title, metrics, rank = "critic", "a critic", ("critic/*",), "critic rank"
    annotation = Annotation.VALUE
    scalar, quantity, preset = True, "value", "ppo"
    rows = staticmethod(value_rows)

    def loss(self, config: RunConfig) -> Loss:
        from sparring.algo.loss.value import ValueLoss

        assert config.rl.critic is not None, "a run without the section opens no critic"
        return ValueLoss(clip=config.rl.critic.clip)

    def head(self, folder: Path) -> str:
        from sparring.model.library import head_of
        from sparring.model.load import read_config

        return "scalar" if head_of(read_config(str(folder), "fast", "own")) == "scalar" else "new scalar"

    def reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return with_explained_variance(metrics)

    def warmup_steps(self, config: RunConfig) -> int:
        return 0 if config.rl.critic is None else config.rl.critic.warmup_steps

    def check_model(self, files: RunFiles, name: str) -> None:
        models, where = files.config.models, "rl.critic.model"
        if name == POLICY:
            if models[POLICY].lora is not None:
                actual, fix = "the policy, which trains an adapter", "name a model of [models] with the base's path"
                raise refusal(where, "weights without an adapter, to add a scalar head to", actual, fix)
        elif name == OWN:
            if OWN not in files.config.run.stages and files.done(OWN) is None:
                stages = str(list(files.config.run.stages))
                raise refusal(where, f"a stage {OWN} before rl", stages, "add it, or name another model")
        else:
            checkpoint_of(files.config, where, name, (POLICY, OWN), given_checkpoint(files.config), head="own")


def with_explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the critic's metrics of a batch, with the explained variance of the returns instead of the sums that it is
    computed from."""
    rest = dict(metrics)
    sums = {name: rest.pop(name) for name in ("return_square", "error", "error_square") if name in rest}
    variance = explained_variance(rest["return"], **sums) if sums else None
    return rest if variance is None else {**rest, "explained_variance": variance}


def explained_variance(mean: float, *, return_square: float, error: float, error_square: float) -> float | None:
    """Return 1 - variance of the error / variance of the return, or None for constant returns. The error is return -
    value; each argument is a mean over tokens.

    The result is 1 for a perfect critic, 0 for a critic with a constant value, and negative for a worse critic.
    """
    spread = return_square - mean**2
    return None if spread <= LEAST_SPREAD * return_square else 1.0 - (error_square - error**2) / spread
