"""The critic of the rl stage: what it is made of, and how its training is told apart from the policy's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.model.hub import base_folder, model_folder
from sparring.observe.hooks import prefixed
from sparring.protocols import Trainer, TrainPlan
from sparring.stages.context import POLICY, Context
from sparring.stages.models.auxiliary import check_asked
from sparring.stages.models.reward_scorers import check_reads_policy
from sparring.stages.runtime.raised import rl_optimiser_steps

CRITIC = "critic"
"""The role of its batches and checkpoints."""
OWN = "reward_model"
"""The stage whose output `rl.critic.model` may name."""
LEAST_SPREAD = 1e-12
"""Of the mean square of returns: below it they do not vary."""


def open_critic(context: Context, source: Path) -> Trainer | None:
    """Return the trainer of `[rl.critic]`, None where there is none; `source` is what the policy begins with."""
    from sparring.algo.loss.value import ValueLoss

    config = context.config
    section = config.rl.critic
    if section is None:
        return None
    folder = critic_folder(context, source)
    plan = TrainPlan(
        losses=[ValueLoss(clip=section.clip)],
        total_steps=rl_optimiser_steps(context),
        overrides=section.train,
        head="scalar" if _is_scalar(folder) else "new scalar",
        role=CRITIC,
    )
    trainer = context.cluster.trainer(_numerics_of(section.model), path=str(folder), plan=plan)
    return prefixed(trainer, CRITIC, with_explained_variance)


def critic_folder(context: Context, source: Path) -> Path:
    """Return the checkpoint that the critic begins with; `source` is what the policy does.

    Raises:
        BadInput: there is none.
    """
    section = context.config.rl.critic
    assert section is not None, "asked of a run with a critic"
    if section.model == POLICY:
        return source
    return context.output(OWN) if section.model == OWN else model_folder(context.config.models[section.model])


def check_critic(context: Context) -> list[str]:
    """Refuse `[rl.critic]` unless `[algo]` needs it, a missing one that it needs, and a model that cannot read the
    policy's tokens."""
    section = context.config.rl.critic
    if not check_asked(context.config, CRITIC, Annotation.VALUE, "ppo") or section is None:
        return []
    _check_model(context, section.model)
    warmup = f"; learns alone through {section.warmup_steps} updates" if section.warmup_steps else ""
    return [f"rl: a critic that begins as {section.model}{warmup}"]


def _check_model(context: Context, name: str) -> None:
    models, where = context.config.models, "rl.critic.model"
    if name == POLICY:
        if models[POLICY].lora is not None:
            do = "name a model of [models] with the base's path"
            raise refusal(
                where, "weights without an adapter, to add a scalar head to", "the policy, which trains an adapter", do
            )
        return
    if name == OWN:
        if OWN not in context.config.run.stages and context.done(OWN) is None:
            stages = str(list(context.config.run.stages))
            raise refusal(where, f"a stage {OWN} before rl", stages, "add it, or name another model")
        return
    if name not in models or models[name].path is None:
        names = ", ".join([POLICY, OWN, *(n for n, spec in models.items() if n != POLICY and spec.path)])
        raise refusal(where, f"one of {names}", repr(name), f"add [models.{name}] path")
    check_reads_policy(name, model_folder(models[name]), context.given())


def _numerics_of(name: str) -> str:
    """Return the model of `[models]` that says how the critic computes."""
    return POLICY if name == OWN else name


def _is_scalar(folder: Path) -> bool:
    kinds = json.loads((base_folder(folder) / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    return any("ForSequenceClassification" in kind for kind in kinds)


def with_explained_variance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the critic's metrics of a batch, with the explained variance of the returns in the place of the sums that
    make it."""
    rest = dict(metrics)
    sums = {name: rest.pop(name) for name in ("return_square", "error", "error_square") if name in rest}
    variance = explained_variance(rest["return"], **sums) if sums else None
    return rest if variance is None else {**rest, "explained_variance": variance}


def explained_variance(mean: float, *, return_square: float, error: float, error_square: float) -> float | None:
    """Return 1 - variance of the error / variance of the return: 1 for a critic that is always right, 0 for a constant
    one, below 0 for a worse one. None if returns do not vary.

    Args:
        mean: of the return.
        return_square: mean square of the return.
        error: mean of return - value.
        error_square: its mean square.
    """
    spread = return_square - mean**2
    return None if spread <= LEAST_SPREAD * return_square else 1.0 - (error_square - error**2) / spread
