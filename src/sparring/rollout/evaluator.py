"""Periodic evaluation alongside training, on the same engine. Training starts evaluations and does not wait for
them."""

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
    """Store that can also restart an evaluation."""

    def truncate(self, stage: str, step: int, *, first_group: int | None = None) -> None:
        """Mark what was recorded after `step` as superseded."""
        ...


class Evaluator:
    """Scheduler of periodic evaluations on training's engine, with its own share of the rollouts.

    The weights may change during an evaluation, so its result names a range of versions. An evaluation that is due
    while the previous one still runs is skipped. Leaving the context stops the running evaluation.

    Args:
        plan: plan of each evaluation. The stage after step 20 is `<plan.stage>/20`.
        every: number of steps between evaluations; 0 disables them.
        on_result: called with the step and the result.
        left_out: called with the step of a skipped evaluation and the step of the running one.
        finished: steps whose evaluation is recorded already.
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
        """Start the evaluation of a step whose weights the engine serves, if it is due. Does not wait for its end.

        Raises:
            Exception: error that ended the previous evaluation, unless it was a failure of the infrastructure.
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
        """Wait for the running evaluation at the end of training.

        Raises:
            Exception: as `after`.
        """
        if self._under_way is not None:
            await self._under_way

    async def _evaluate(self, step: int) -> None:
        plan = replace(self._plan, stage=f"{self._plan.stage}/{step}")
        # an earlier process sampled its rollouts with weights that no step has any more
        self._store.truncate(plan.stage, 0, first_group=0)
        findings = await evaluate(
            self._runner, plan, max_concurrent_rollouts=self._share.most, share=self._share, store=self._store
        )
        self._on_result(step, summarize(plan, findings))
