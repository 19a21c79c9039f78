"""What the algorithm asks for beside what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparring.algo.annotate.forwarded import Forwarded
from sparring.algo.annotate.kl import KlCoefficient
from sparring.algo.annotate.loglinear import ProximalShare
from sparring.errors import refusal
from sparring.model.hub import local_folder
from sparring.protocols import Annotator, Trainer, TrainPlan
from sparring.stages.context import POLICY, Context
from sparring.stages.critic import CRITIC
from sparring.stages.implicit import IMPLICIT
from sparring.stages.online import needs_reference


def annotators(
    context: Context, trainers: Mapping[str, Trainer], source: Path, coefficient: KlCoefficient
) -> list[Annotator]:
    """In the order in which they are to be asked.

    Args:
        context: of the run.
        trainers: of the policy, and of what learns beside it.
        source: the checkpoint folder that it started from.
        coefficient: of the KL penalty, where it adapts.
    """
    config, trainer = context.config, trainers[POLICY]
    found: list[Annotator] = [Forwarded(trainers[CRITIC].forward, "value", "value")] if CRITIC in trainers else []
    if IMPLICIT in trainers:  # as it is before the update: the paper's single forward
        found.append(Forwarded(trainers[IMPLICIT].forward, IMPLICIT))
    algo, steps = config.algo, config.rl.passes * config.rl.minibatches
    ours = config.rl.preference is None
    # of a batch that is trained once, the forward with gradients says what the trainer's were before the update
    if ours and algo.needs_proximal and steps > 1:
        guessed = algo.anchor == "loglinear"
        found.append(ProximalShare(lambda: trainer.version) if guessed else Forwarded(trainer.forward, "proximal"))
    if ours and algo.reads("probability_squares"):
        found.append(Forwarded(trainer.forward, "probability_squares", "probability_squares"))
    if needs_reference(config):
        found.append(Forwarded(_reference(context, trainer, source).forward, "reference"))
    if ours and algo.adaptive.target is not None:
        found.append(coefficient)
    if ours and algo.kl_reward is not None:
        found.append(algo.kl_reward)
    return found


def _reference(context: Context, trainer: Trainer, source: Path) -> Trainer:
    """The trainer that is asked: the policy's own, or one that is never trained."""
    name = context.config.algo.kl.reference
    if name == "last":
        return trainer
    plan = TrainPlan(losses=[], total_steps=1, overrides={})
    if name == "start":
        return context.cluster.trainer(POLICY, path=str(source), plan=plan)
    return context.cluster.trainer(name, path=str(reference_folder(context)), plan=plan)


def reference_folder(context: Context) -> Path:
    """The checkpoint folder of a reference that `[models.<name>]` names.

    Raises:
        BadInput: no such model, or one without a path.
    """
    name, models = context.config.algo.kl.reference, context.config.models
    if name not in models or models[name].path is None:
        got = f"{name!r}, which {'has no path' if name in models else 'no [models] section describes'}"
        raise refusal("algo.kl.reference", "start, last or a model with a path", got, f"add [models.{name}] with a path")
    return local_folder(str(models[name].path))


def check_reference(context: Context) -> None:
    """The KL penalty's reference can be asked, and has something to say.

    Raises:
        BadInput: it cannot, or has not.
    """
    config, kl = context.config, context.config.algo.kl
    if not config.algo.needs_reference:
        return
    if kl.reference == "last":
        if kl.coefficient and config.rl.passes * config.rl.minibatches == 1:
            do = "set rl.minibatches or rl.passes, or choose another reference"
            raise refusal("algo.kl.reference", "several optimiser steps an update beside \"last\"", "one, whose KL is 0", do)
    elif kl.reference != "start":
        theirs = reference_folder(context) / "tokenizer.json"
        ours = context.given()
        if ours is not None and theirs.exists() and theirs.read_bytes() != (ours / "tokenizer.json").read_bytes():
            raise refusal("algo.kl.reference", "a model with the policy's tokenizer", f"{theirs}, another", "choose such a model")
