"""Runner of a run's rollouts: environment, harness and recorder on one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sparring.envs.threads import THREADS
from sparring.protocols import Engine
from sparring.record.recorder import Recorder
from sparring.rollout.journal import Journals
from sparring.rollout.runner import RolloutRunner
from sparring.stages.context import POLICY, Context, renderer_of
from sparring.stages.models.context_length import policy_context
from sparring.stages.models.player import with_roles


def rollout_runner(
    context: Context,
    engine: Engine,
    model: Path,
    others: Mapping[str, Engine],
    *,
    greedy: bool = False,
    rebuilds: bool = False,
) -> RolloutRunner:
    """Return a runner of the run's rollouts.

    Args:
        model: checkpoint folder that `engine` serves.
        greedy: whether the policy takes its likeliest token; such turns are not stored, because they are not trained.
        rebuilds: whether rollouts that an earlier process began continue from the store.
    """
    sampling, store = context.config.rollout.sampling.build(), None if greedy else context.store
    recorder = Recorder(
        engine,
        renderer_of(context.config, model),
        store,
        sampling=replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) if greedy else sampling,
        model=POLICY,
        max_context=policy_context(context.config, model),
    )
    return RolloutRunner(
        context.factory,
        context.boxes,
        with_roles(context.config, recorder, others, store),
        context.harness,
        context.config.rollout,
        executors=THREADS.executor,
        box_starts=context.box_starts,
        log=Journals(context.store if rebuilds else None, begins=True),
        report=lambda sentence: context.sink.event("rollout", sentence),
    )
