"""Circuit breaker of an environment. While the environment's infrastructure is down, one rollout at a time tries it. If
it stays down, the run ends with an error instead of training on nothing (law 6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sparring.errors import EnvError, InfraError, JudgeError, Outage, SandboxError, ToolHostError
from sparring.observe.metrics import Metrics
from sparring.rollout.blame import Call
from sparring.types import Group

ENVIRONMENTS = (SandboxError, ToolHostError, EnvError)
"""Errors of an environment's infrastructure. `EmptySteps` detects a failing engine or judge."""
FEWEST_FAILURES = 8
"""Minimum number of consecutive failures that opens a breaker."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before the first probe of an outage, and the longest pause. The pause doubles with each probe."""
EMPTY_STEPS = 3
"""Number of consecutive steps without a trainable rollout that ends the run."""


@dataclass(slots=True)
class Trial:
    """Attempt at a rollout, as its breaker sees it. The runner sets `error` if the attempt failed, and `broken` to the
    failed call of the environment. Afterwards `is_excused` is true if the attempt was running when an outage began;
    such an attempt costs no retry."""

    task: str
    breaker: Breaker
    is_probe: bool
    error: InfraError | None = None
    broken: Call | None = None
    is_excused: bool = False

    def answered(self, call: Call) -> None:
        """Report a call that the environment answered."""
        if self.is_probe:
            self.breaker.answered(self, call)


class Breaker:
    """State of one environment's infrastructure: closed in normal operation, open during an outage.

    The breaker opens when the consecutive failed attempts are at least `FEWEST_FAILURES`, outnumber the attempts that
    are still running, and belong to more than one task. Intermittent failures, or one poisonous task, do not open it.
    While it is open, one attempt at a time is the probe and the others wait. It closes when the environment answers a
    call of the probe of the same kind as the last failed call; if no call had failed, when the probe succeeds.

    Args:
        outage_s: seconds after which a failed probe ends the run.
        report: called with a sentence when the breaker opens or closes.
        metrics: collector of `rollout/outages` and of their seconds, `rollout/outage_s`.
    """

    def __init__(self, name: str, outage_s: float, report: Callable[[str], None], metrics: Metrics) -> None:
        self._name, self._outage_s, self._report, self._metrics = name, outage_s, report, metrics
        self._failures = 0
        self._failed_tasks: set[str] = set()
        self._broken: Call | None = None
        self._running = 0
        self._opened_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._probing = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_open(self) -> bool:
        """True during an outage."""
        return self._opened_s is not None

    @asynccontextmanager
    async def trial(self, task: str) -> AsyncIterator[Trial]:
        """Wait until an attempt at a task may begin, and count how the attempt ends. Raises Outage if the attempt was a
        probe that failed, and the outage has lasted `outage_s`."""
        trial = Trial(task=task, breaker=self, is_probe=await self._wait_for_probe())
        self._running += 1
        try:
            yield trial
        except BaseException:
            self._running -= 1
            self._end_probe(trial)
            raise
        self._running -= 1
        if trial.error is None or isinstance(trial.error, JudgeError):  # the environment itself worked
            self._count_success()
        elif isinstance(trial.error, ENVIRONMENTS):
            self._count_failure(trial)
        self._end_probe(trial)

    def answered(self, trial: Trial, call: Call) -> None:
        """Count an answered call of a probe. If it is of the same kind as the last failed call, the outage ends, and
        the attempt is a probe no longer."""
        if call == self._broken:
            self._end_probe(trial)
            trial.is_probe = False
            self._count_success()

    async def _wait_for_probe(self) -> bool:
        """Wait while another attempt is the probe. Return whether this attempt is the next probe."""
        while self.is_open:
            if not self._probing:
                self._probing = True
                try:
                    await asyncio.sleep(self._pause_s)
                except BaseException:
                    self._probing = False
                    self._wake()
                    raise
                return True
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        return False

    def _count_success(self) -> None:
        self._failures, self._pause_s = 0, FIRST_PAUSE_S
        self._failed_tasks.clear()
        self._broken = None
        if self._opened_s is not None:
            down_s = asyncio.get_running_loop().time() - self._opened_s
            self._opened_s = None
            self._metrics.add("rollout/outage_s", down_s, "sum")
            self._report(f"environment {self._name} answers again after {down_s:.0f} s: rollouts go on")
            self._wake()

    def _count_failure(self, trial: Trial) -> None:
        now = asyncio.get_running_loop().time()
        self._failures += 1
        self._failed_tasks.add(trial.task)
        self._broken = trial.broken or self._broken
        enough = self._failures >= max(FEWEST_FAILURES, self._running + 1) and len(self._failed_tasks) > 1
        if self._opened_s is None and enough:
            self._opened_s = now
            self._metrics.add("rollout/outages", 1, "sum")
            self._report(
                f"environment {self._name} failed {self._failures} times in a row ({trial.error}): no rollout begins, "
                f"one at a time tries it; the run ends if it stays so for {self._outage_s:g} s"
            )
        elif self._opened_s is not None and trial.is_probe:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if now - self._opened_s >= self._outage_s:
                raise Outage(
                    f"environment {self._name}: expected a rollout that its infrastructure does not break within "
                    f"{self._outage_s:g} s, got {trial.error}; mend it, then the same command goes on: nothing is lost"
                )
        trial.is_excused = self.is_open and not trial.is_probe

    def _end_probe(self, trial: Trial) -> None:
        if trial.is_probe:
            self._probing = False
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


@dataclass(slots=True)
class Breakers:
    """Breakers of all environments of a run, by name."""

    outage_s: float
    report: Callable[[str], None] = lambda sentence: None
    metrics: Metrics = field(default_factory=Metrics)
    _breakers: dict[str, Breaker] = field(default_factory=dict)

    def of(self, environment: str) -> Breaker:
        """Return the breaker of an environment."""
        if environment not in self._breakers:
            self._breakers[environment] = Breaker(environment, self.outage_s, self.report, self.metrics)
        return self._breakers[environment]


class EmptySteps:
    """Counter of consecutive steps without a trainable rollout.

    Args:
        report: called with a sentence for each such step.
    """

    def __init__(self, groups_per_step: int, report: Callable[[str], None]) -> None:
        self._groups_per_step, self._report = groups_per_step, report
        self._rollouts = self._in_a_row = 0

    def add(self, group: Group) -> None:
        """Count a group. Groups must come in admission order. Raises Outage if this was the last of `EMPTY_STEPS`
        consecutive steps without a trainable rollout."""
        self._rollouts += len(group.rollouts)
        step, place = divmod(group.index, self._groups_per_step)
        if place + 1 < self._groups_per_step:
            return
        self._in_a_row = 0 if self._rollouts else self._in_a_row + 1
        self._rollouts = 0
        if not self._in_a_row:
            return
        failure = group.failed[-1].outcome.failure if group.failed else None
        why = f"{failure.error}: {failure.where}: {failure.message}" if failure is not None else "nothing was scored"
        if group.failed and failure is None:
            why = f"{group.failed[-1].outcome.reason} before the policy's first turn"
        if self._in_a_row >= EMPTY_STEPS:
            raise Outage(
                f"steps {step + 2 - EMPTY_STEPS} to {step + 1}: expected rollouts to train, got none of "
                f"{EMPTY_STEPS * self._groups_per_step} groups, the last for {why}; mend that, then the same command "
                "goes on"
            )
        self._report(f"step {step + 1} trains on nothing: every rollout of its groups was lost, the last for {why}")
