"""The implicit process reward model of the rl stage: what it begins as, and that it is there where PRIME asks it."""

from __future__ import annotations

import json
from pathlib import Path

from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.model.hub import model_folder
from sparring.observe.hooks import prefixed
from sparring.protocols import Trainer, TrainPlan
from sparring.stages.context import POLICY, Context
from sparring.stages.models.auxiliary import check_asked
from sparring.stages.models.reward_scorers import check_reads_policy
from sparring.stages.runtime.raised import rl_optimiser_steps

IMPLICIT = "implicit"
"""The role of its batches and checkpoints, and the annotation with its log-probabilities."""


def open_implicit(context: Context, source: Path) -> Trainer | None:
    """Return the trainer of `[rl.implicit]`, None where there is none; `source` is what the policy begins with."""
    from sparring.algo.loss.implicit import ImplicitReward

    config = context.config
    section, scale = config.rl.implicit, config.algo.credit.implicit_scale
    if section is None:
        return None
    assert scale is not None, "check_implicit has seen the run"
    plan = TrainPlan(
        losses=[ImplicitReward(beta=scale)],
        total_steps=rl_optimiser_steps(context),
        overrides=section.train,
        role=IMPLICIT,
    )
    folder = implicit_folder(context, source)
    return prefixed(context.cluster.trainer(section.model, path=str(folder), plan=plan), IMPLICIT)


def implicit_folder(context: Context, source: Path) -> Path:
    """Return the checkpoint that it begins with; `source` is what the policy does.

    Raises:
        BadInput: there is none.
    """
    section = context.config.rl.implicit
    assert section is not None, "asked of a run with an implicit reward model"
    return source if section.model == POLICY else model_folder(context.config.models[section.model])


def check_implicit(context: Context) -> list[str]:
    """Refuse `[rl.implicit]` unless `[algo]` needs it, a missing one that it needs, and a model that is no language
    model over the policy's tokens."""
    section = context.config.rl.implicit
    if not check_asked(context.config, IMPLICIT, Annotation.IMPLICIT, "prime") or section is None:
        return []
    _check_model(context, section.model)
    return [f"rl: an implicit reward model that begins as {section.model}"]


def _check_model(context: Context, name: str) -> None:
    models = context.config.models
    if name == POLICY:
        return
    if name not in models or models[name].path is None:
        names = ", ".join([POLICY, *(n for n, spec in models.items() if n != POLICY and spec.path)])
        raise refusal("rl.implicit.model", f"one of {names}", repr(name), f"add [models.{name}] path")
    folder = model_folder(models[name])
    check_reads_policy(name, folder, context.given())
    kinds = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    if any("ForSequenceClassification" in kind for kind in kinds):
        do = "name a language model: what this one's stage began with"
        raise refusal(
            f"models.{name}.path", "a language model, whose log-probabilities are the reward", ", ".join(kinds), do
        )
