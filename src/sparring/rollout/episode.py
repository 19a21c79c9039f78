"""What one rollout hands its harness, and the guard around its world."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from sparring.errors import EnvError, InfraError, boundary
from sparring.protocols import Sandbox, Session, World
from sparring.types import Message, Observation, Outcome, Score, Task, Timing, ToolSpec, Trajectory

CLOSE_TIMEOUT_S = 30.0
"""A world or box that takes longer to close is left behind."""


class RecordingSession(Session, Protocol):
    """A session that can say what it recorded."""

    def trajectory(self, outcome: Outcome, timing: Timing) -> Trajectory:
        """The record so far."""
        ...

    async def close(self) -> None:
        """Let the engine forget the conversation."""
        ...


class SessionRecorder(Protocol):
    """Opens recorded sessions: `record.Recorder`."""

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, priority: int) -> RecordingSession:
        """A session of one role of one rollout."""
        ...


class GuardedEnv:
    """A world whose foreign exceptions and answers become `EnvError` and whose time is measured. Implements
    `protocols.World`.

    Args:
        make: makes the world, when it is first needed.

    Attributes:
        world_s: seconds spent inside the world.
    """

    def __init__(self, make: Callable[[], World]) -> None:
        self._make = make
        self._made: World | None = None
        self._observed: list[Observation] = []
        self.world_s = 0.0

    @property
    def _env(self) -> World:
        if self._made is None:
            with boundary(EnvError, "env"):
                self._made = self._make()
        return self._made

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The world's tools."""
        with boundary(EnvError, "env.tools"):
            return self._env.tools

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Open the world. Raises EnvError for whatever its code raises, and for what no model can be told."""
        with _Measured(self, "env.open"):
            self._observed = [_told(await self._env.open(task, box))]
            return self._observed[0]

    async def step(self, reply: Message) -> Observation:
        """Answer a reply. Raises EnvError for whatever its code raises, and for what no model can be told."""
        with _Measured(self, "env.step"):
            self._observed.append(_told(await self._env.step(reply)))
            return self._observed[-1]

    async def score(self, trajectory: Trajectory) -> Score | None:
        """Score a trajectory. Raises EnvError for whatever its code raises, and for a reward that is no finite number;
        a JudgeError passes through."""
        with _Measured(self, "env.score"):
            return _rated(await self._env.score(trajectory))

    def with_turns(self, score: Score, trajectory: Trajectory) -> Score:
        """The score with what observations said of each sampled turn, where it does not say so itself: the reward that
        answered it (0 where none did) and the state that it was taken in. It stays as it is where the world answered
        more replies than were sampled: nobody then knows which.
        """
        turns = sum(segment.model is not None and bool(segment.tokens) for segment in trajectory.segments)
        answers = self._observed[1:]
        if len(answers) > turns:
            return score
        if score.per_turn is None and any(answer.reward is not None for answer in answers):
            rewards = [answer.reward or 0.0 for answer in answers]
            score = replace(score, per_turn=(*rewards, *[0.0] * (turns - len(rewards))))
        if score.states is None and any(observation.state_key is not None for observation in self._observed):
            keys = [observation.state_key for observation in self._observed][:turns]
            score = replace(score, states=(*keys, *[None] * (turns - len(keys))))
        return score

    async def close(self) -> None:
        """Close the world, if there is one. Raises EnvError for whatever its code raises."""
        if self._made is not None:
            with _Measured(self, "env.close"):
                await self._made.close()


def _told(said: object) -> Observation:
    """What a world said, if it is an observation of text that UTF-8 (so tokenizer and store) can carry; its reward adds
    up."""
    if not isinstance(said, Observation):
        raise TypeError(f"expected an Observation, got {said!r:.80}")
    if said.reward is not None and not (isinstance(said.reward, (int, float)) and math.isfinite(said.reward)):
        raise ValueError(f"expected a finite number as reward, got {said.reward!r:.80}")
    for message in said.messages:
        message.content.encode()
    return said


def _rated(score: object) -> Score | None:
    """What a world scored, if a baseline can be made with it."""
    if score is not None and not isinstance(score, Score):
        raise TypeError(f"expected a Score or None, got {score!r:.80}")
    reward = None if score is None else score.reward
    if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
        raise ValueError(f"expected a finite number as reward, got {reward!r:.80}")
    return score


class _Measured(boundary):
    """The boundary around one call of a world, under a stopwatch."""

    __slots__ = ("_clock", "_env", "_started")

    def __init__(self, env: GuardedEnv, where: str) -> None:
        super().__init__(EnvError, where)
        self._env = env
        self._clock = asyncio.get_running_loop().time

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self._env.world_s += self._clock() - self._started
        super().__exit__(kind, cause, trace)


class RunningEpisode:
    """One attempt at one task: its world, its box and its sessions. Implements `protocols.Episode`.

    The policy's session is open from the start, so that even an attempt that never reached the model leaves a
    trajectory.
    """

    def __init__(
        self, task: Task, env: GuardedEnv, recorder: SessionRecorder, *, rollout_id: str, seed: int, priority: int
    ) -> None:
        self.task = task
        self.env = env
        self.box: Sandbox | None = None
        self._recorder = recorder
        self._rollout_id = rollout_id
        self._seed = seed
        self._priority = priority
        self._sessions: dict[str, RecordingSession] = {}
        self.session()

    def session(self, role: str = "policy") -> Session:
        """The session of a role, opened when it is first asked for."""
        if role not in self._sessions:
            self._sessions[role] = self._recorder.open(
                self.task,
                rollout_id=self._rollout_id,
                seed=self._seed,
                role=role,
                priority=self._priority,
            )
        return self._sessions[role]

    def trajectories(self, outcome: Outcome, timing: Timing) -> tuple[Trajectory, ...]:
        """What was recorded, one trajectory per role, the policy's first. Each session adds its `generate_s` to
        `timing`."""
        return tuple(session.trajectory(outcome, timing) for session in self._sessions.values())

    async def close(self) -> list[InfraError]:
        """Close world, box and sessions, each whatever the others do. What fails to close changes no outcome: it is
        returned."""
        failures: list[InfraError] = []
        closers = [self.env.close, *(s.close for s in self._sessions.values())]
        if self.box is not None:
            closers.insert(1, self.box.close)
        for closer in closers:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await closer()
            except InfraError as error:
                failures.append(error)
            except TimeoutError:
                failures.append(EnvError(f"{closer.__qualname__}: not closed after {CLOSE_TIMEOUT_S:.0f} s"))
        return failures
