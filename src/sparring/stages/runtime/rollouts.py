"""Rollouts of a run: its environment, its harness and its recorder on one engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sparring.protocols import Engine
from sparring.record.recorder import Recorder
from sparring.rollout.runner import RolloutRunner
from sparring.stages.context import POLICY, Context
from sparring.stages.models.context_length import max_context, outline_of


def rollout_runner(context: Context, engine: Engine, model: Path, *, greedy: bool = False) -> RolloutRunner:
    """Return the runner of this run's rollouts on `engine`, which serves the checkpoint folder `model`. A greedy
    one is not kept turn by turn: it is no part of what is trained."""
    sampling = context.config.rollout.sampling()
    recorder = Recorder(
        engine,
        context.renderer(model),
        None if greedy else context.store,
        sampling=replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) if greedy else sampling,
        model=POLICY,
        max_context=max_context(outline_of(model), context.config.engine, context.config.models[POLICY].dtype),
    )
    return RolloutRunner(
        context.factory,
        context.boxes,
        recorder,
        context.harness,
        context.config.rollout,
        report=lambda sentence: context.sink.event("rollout", sentence),
        places={name: domain.places for name, domain in context.config.envs.items() if domain.places is not None},
    )
