"""Guard around the environment of one attempt: time limits of its phases, and who caused its errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from sparring.envs.answers import observed, rated
from sparring.envs.box_at_home import BoxAtHome
from sparring.envs.executor import EXECUTOR, Executor, InlineExecutor, is_cooperative
from sparring.envs.preparation import Preparation
from sparring.envs.roles import roles_of
from sparring.errors import (
    BadInput,
    EnvError,
    InfraError,
    LimitReached,
    PolicyFailure,
    SparringError,
    StoreError,
    boundary,
    refusal,
)
from sparring.protocols import AnyEnv, HandedOver, RolesEnv, Sandbox, SingleEnv
from sparring.rollout.blame import AttemptCalls, Successes, WorldCalls
from sparring.rollout.config import RolloutConfig
from sparring.rollout.journal import Playback
from sparring.rollout.phases import Phases, Waits
from sparring.rollout.turn_rewards import WorldAnswer, with_turns
from sparring.types import (
    DEFAULT_ROLES,
    Message,
    Observation,
    Score,
    Task,
    ToolSpec,
    Trajectory,
)

OF_WORLDS = (InfraError, PolicyFailure, BadInput, StoreError)
"""Errors of Sparring that an environment may raise: failures of the infrastructure and of the policy, a refusal that no
retry can help, and errors of the run's store. Other errors of Sparring become an `EnvError`, because they are about the
run, which an environment does not know."""


class GuardedEnv:
    """Environment with a guard around every call. Its exceptions and invalid answers become `EnvError`, its calls run
    in an executor under the limits of their phases, and its time is measured. Implements `protocols.World`, and makes,
    scores and closes the environment.

    Args:
        executor: runs the environment's code; None runs it on the event loop.
        phases: phases of the attempt; None uses the default limits.
        timeout_s: seconds that the policy's own commands may take together.
        calls: counter of the attempt's calls of the environment, with the playback of its journal; None if there is no
            journal.
        at_once: whether the environment is made on the event loop, because its constructor does not block.

    Attributes:
        world_s: seconds spent inside the environment.
        policy_s: seconds of the policy's own commands: of steps that answered, without the time in which a box waits to
            run a command.
    """

    def __init__(
        self,
        make: Callable[[], AnyEnv],
        executor: Executor | None = None,
        phases: Phases | None = None,
        *,
        timeout_s: float = math.inf,
        calls: AttemptCalls | None = None,
        at_once: bool = False,
        preparation: Preparation | None = None,
    ) -> None:
        self._make = make
        self.preparation = Preparation() if preparation is None else preparation
        self.calls = calls or AttemptCalls(WorldCalls(Successes()), Playback())
        self._executor = InlineExecutor() if executor is None else executor
        self.phases = Phases(Waits(RolloutConfig())) if phases is None else phases
        self._timeout_s, self._at_once = timeout_s, at_once
        self._made: AnyEnv | None = None
        self._roles: tuple[str, ...] = DEFAULT_ROLES
        self._tools: tuple[ToolSpec, ...] | None = None
        self._box: Sandbox | None = None
        self._observed: list[WorldAnswer] = []
        self._abandonment_noted = False
        self._reads_tools = False
        self.world_s = 0.0
        self.policy_s = 0.0

    @property
    def _env(self) -> AnyEnv:
        if self._made is None:
            with boundary(EnvError, "env"):
                self._make_env()
        assert self._made is not None
        return self._made

    def _make_env(self) -> None:
        """Make the environment. `close` closes it even if the task that makes it is cancelled meanwhile."""
        made = self._make()
        self._roles = roles_of(made)
        self._made = made

    @property
    def playback(self) -> Playback:
        """Playback of the attempt's journal."""
        return self.calls.playback

    @property
    def abandoned(self) -> bool:
        """True if a call continued after it was cancelled; the environment is then not called again."""
        return self._executor.abandoned

    @property
    def rebuildable(self) -> bool:
        """False if the environment declares that it does not answer the same when it is run again."""
        return bool(getattr(self._made, "rebuildable", True))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that the environment names."""
        _ = self._env
        return self._roles

    @property
    def first_role(self) -> str:
        """First role of the environment; the default role before the environment is made."""
        return self._roles[0]

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """Tools of the environment after its latest answer."""
        if self._tools is not None:
            return self._tools
        with boundary(EnvError, "env.tools"):
            return self._env.tools

    async def make(self) -> None:
        """Make the environment unless it exists. Raises EnvError for any exception of its code."""
        if self._at_once:
            _ = self._env
        if self._made is None:
            with self.phases.within("open"):
                with _Measured(self, "env"):
                    await self._call(self._make_env)

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Open the environment. Raises EnvError for any exception of its code, and for an answer that no model can be
        shown."""
        self._box = box
        env = self._env
        if self.playback.is_rebuild and not self.rebuildable:
            self.playback.differ("the world says that it cannot be rebuilt")
        with self.phases.within("open"):
            with _Measured(self, "env.open"), self.calls.call("open"):
                own = None if box is None else BoxAtHome(box)
                if box is not None:
                    await self.preparation.prepare(env, task, box, self._call)
                opened = observed(await self._call(env.open, task, own))
                await self._read_tools(opened=True)
        if isinstance(box, HandedOver):
            box.hand_over()
        self._observed = [WorldAnswer("", None, opened)]
        self.playback.answered("", opened)
        return opened

    async def step(self, reply: Message, role: str | None = None, *, of: Message | None = None) -> Observation:
        """Return the environment's answer to a reply.

        Args:
            role: role that replied; None is the only role of the environment.
            of: reply of the policy that `reply` was made from; None if `reply` is the policy's own.

        Raises:
            EnvError: its code raised an exception, or its answer cannot be shown to a model.
            LimitReached: the policy's own commands exceeded their time limit.
            BadInput: the environment has no such role.
        """
        role = self.check_role(role, "env.step")
        self._check_time()
        clock = asyncio.get_running_loop().time
        with self.phases.within("tool", ", ".join([call.name for call in reply.tool_calls])):
            started, queued_s = clock(), self._queued_s()
            with _Measured(self, "env.step"), self.calls.call("step", role, reply):
                if len(self._roles) > 1:
                    answer = await self._call(cast(RolesEnv, self._env).step_of, role, reply)
                else:
                    answer = await self._call(cast(SingleEnv, self._env).step, reply)
                observation = observed(answer)
                took_s = clock() - started - (self._queued_s() - queued_s)
                if self._reads_tools:
                    await self._read_tools()
        self.policy_s += self.playback.answered(role, observation, took_s)
        self._check_time()
        self._observed.append(WorldAnswer(role, of or reply, observation))
        return observation

    async def score(self, trajectories: Sequence[Trajectory]) -> Score | None:
        """Score a rollout; an environment of several roles gets all trajectories together. Raises EnvError for any
        exception of the environment's code except JudgeError, and for a reward that is not finite."""
        env = self._env
        with self.phases.within("score", getattr(env, "reward_name", "") or type(env).__name__):
            with _Measured(self, "env.score"), self.calls.call("score"):
                try:
                    if len(self._roles) > 1:
                        by_role = {trajectory.role: trajectory for trajectory in trajectories}
                        score = await self._call(cast(RolesEnv, env).score_all, by_role)
                    else:
                        score = await self._call(cast(SingleEnv, env).score, trajectories[0])
                except asyncio.CancelledError:
                    current = asyncio.current_task()
                    if current is not None and current.cancelling():
                        raise
                    raise EnvError("env.score: CancelledError: its own code was cancelled") from None
                return rated(score, self._roles, trajectories)

    def check_role(self, role: str | None, where: str) -> str:
        """Return the role; None is the only role of the environment. Raises BadInput if the environment has no such
        role, or has several and none is given."""
        roles = self.roles
        if role is None and len(roles) == 1:
            return roles[0]
        if role not in roles:
            expected = f"a role of the environment ({', '.join(roles)})"
            remedy = "correct the harness (rollout.harness), or add the role to the environment's roles"
            raise refusal(where, expected, "none" if role is None else repr(role), remedy)
        return role

    def with_turns(self, score: Score, trajectories: Sequence[Trajectory]) -> Score:
        """Return the score with the rewards and states of turns; see `turn_rewards.with_turns`. Raises HarnessError if
        a reward or state belongs to no turn."""
        return with_turns(score, trajectories, self._observed, several=len(self._roles) > 1)

    async def close(self) -> None:
        """Close the environment, if it was made and not abandoned. Raises EnvError for any exception of its code."""
        try:
            if self._made is not None and not self.abandoned:
                with _Measured(self, "env.close"):
                    await self._call(self._made.close, run=self._executor.finish)
        finally:
            self._executor.close()

    async def _call(
        self, method: Callable[..., Any], *arguments: Any, run: Callable[..., Awaitable[Any]] | None = None
    ) -> Any:
        """Call a method of the environment, on the event loop if it is cooperative, else in the executor. `run` is the
        executor's method that runs it there."""
        try:
            if not is_cooperative(method):
                return await (run or self._executor.run)(method, *arguments)
            before = EXECUTOR.get()
            EXECUTOR.set(self._executor)
            try:
                return await method(*arguments)
            finally:
                EXECUTOR.set(before)
        finally:
            if self.abandoned and not self._abandonment_noted:
                self._abandonment_noted = True
                self.phases.note("abandoned", {"call": getattr(method, "__qualname__", repr(method))})

    async def _read_tools(self, *, opened: bool = False) -> None:
        """Read the tools if they are a property with blocking code; other tools are read on access."""
        if opened:
            read = getattr(type(self._env), "tools", None)
            self._reads_tools = isinstance(read, property) and not getattr(read.fget, "__cooperative__", False)
        if self._reads_tools:
            self._tools = await self._call(lambda: self._env.tools)

    def _queued_s(self) -> float:
        """Return the seconds that commands of the box have waited to be run."""
        return getattr(self._box, "queued_s", 0.0)

    def _check_time(self) -> None:
        turn, seconds = self.phases.turns, self.policy_s
        if self.playback.timed_out(seconds > self._timeout_s, turn, seconds):
            answers = self.playback.answers.total()
            data = {"phase": "policy", "turn": turn, "seconds": seconds, "answers": answers}
            if not self.playback.closed:
                self.phases.note("limit", data)
            raise LimitReached("timeout", f"the policy's commands took {self.policy_s:.3g} s of {self._timeout_s:g} s")


class _Measured(boundary):
    """Error boundary around one call of a world, with a stopwatch."""

    __slots__ = ("_clock", "_env", "_started")

    def __init__(self, env: GuardedEnv, where: str) -> None:
        super().__init__(EnvError, where)
        self._env = env
        self._clock = asyncio.get_running_loop().time

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self._env.world_s += self._clock() - self._started
        if isinstance(cause, SparringError) and not isinstance(cause, OF_WORLDS):
            raise EnvError(f"{self._text[0]}: {type(cause).__name__}: {cause}") from cause
        super().__exit__(kind, cause, trace)
