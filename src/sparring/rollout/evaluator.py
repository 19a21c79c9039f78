"""Evaluations beside training, on the engine that training samples from: training starts them and never waits for
one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from sparring.observe.evaluation import Evaluation
from sparring.rollout.evaluate import EvalPlan, EvalStore, ScoredRunner, evaluate, summarize
from sparring.rollout.load import EvalShare
from sparring.rollout.runner import RolloutRunner


class RestartableStore(EvalStore, Protocol):
    """A store that can also begin an evaluation again."""

    def truncate(self, stage: str, step: int, *, first_group: int | None = None) -> None:
        """Let what was recorded after `step` count no longer."""
        ...


class Evaluator:
    """A second scheduler on training's engine, with a share of its own. An evaluation goes on while the weights change,
    so its result has a range of versions. Where the next is due before its end, that one is left out: evaluations never
    queue up.

    Use it as a context: leaving it stops what is under way.

    Args:
        runner: runs one rollout.
        plan: whose `stage` is what those after a step begin with: the one after step 20 is recorded under `<stage>/20`.
        every: so many steps; 0 never evaluates.
        share: of the rollouts in flight.
        store: the record.
        on_result: called with the step and the result.
        left_out: called with the step whose evaluation was due, and the one that is still under way.
        finished: steps whose evaluation is recorded; none comes again.
    """

    def __init__(
        self,
        runner: RolloutRunner | ScoredRunner,
        plan: EvalPlan,
        *,
        every: int,
        share: EvalShare,
        store: RestartableStore,
        on_result: Callable[[int, Evaluation], None],
        left_out: Callable[[int, int], None],
        finished: Collection[int] = (),
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._every = every
        self._share = share
        self._store = store
        self._on_result = on_result
        self._left_out = left_out
        self._finished = frozenset(finished)
        self._step = 0
        self._under_way: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Evaluator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)

    def after(self, step: int) -> None:
        """Start the evaluation of a step whose weights are being served, if one is due. Waits for nothing.

        Raises:
            Exception: what killed the one before, if it was no infrastructure failure.
        """
        if not self._every or step % self._every or step in self._finished:
            return
        if self._under_way is not None and not self._under_way.done():
            self._left_out(step, self._step)
            return
        if self._under_way is not None:
            self._under_way.result()
        self._step = step
        self._under_way = asyncio.get_running_loop().create_task(self._evaluate(step))

    async def finish(self) -> None:
        """Wait for the one that is under way, when training is over.

        Raises:
            Exception: as `after`.
        """
        if self._under_way is not None:
            await self._under_way

    async def _evaluate(self, step: int) -> None:
        plan = replace(self._plan, stage=f"{self._plan.stage}/{step}")
        # what an earlier process left of it was sampled with weights that are no longer those of any step
        self._store.truncate(plan.stage, 0, first_group=0)
        findings = await evaluate(
            self._runner, plan, max_concurrent_rollouts=self._share.most, share=self._share, store=self._store
        )
        self._on_result(step, summarize(plan, findings))
