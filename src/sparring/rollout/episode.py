"""One rollout as its harness sees it, and the guard around its world."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, cast

from sparring.envs.roles import roles_of
from sparring.errors import EnvError, InfraError, LimitReached, boundary, refusal
from sparring.protocols import AnyEnv, RolesEnv, Sandbox, Session, SingleEnv
from sparring.record.replies import RecordedReplies
from sparring.record.transcript import Transcript
from sparring.rollout.rebuild import Watch
from sparring.types import (
    DEFAULT_ROLES,
    Message,
    Observation,
    Outcome,
    Score,
    Task,
    Timing,
    ToolSpec,
    Trajectory,
)

CLOSE_TIMEOUT_S = 30.0
"""A world or box that takes longer to close is left behind."""
ANSWERED = Outcome(kind="completed", reason="answered")


class OpenSession(Session, Protocol):
    """A session as the episode that opened it sees it."""

    @property
    def limit(self) -> LimitReached | None:
        """The limit that the latest request hit; None where that was answered."""

    def trajectory(self, outcome: Outcome, timing: Timing) -> Trajectory:
        """Return the record so far."""

    def transcript(self) -> Transcript:
        """Return the conversation so far, in messages."""

    async def close(self) -> None:
        """Let the engine forget the conversation."""


class SessionRecorder(Protocol):
    """Opens sessions that know what they recorded: `record.Recorder`."""

    def open(
        self,
        task: Task,
        *,
        rollout_id: str,
        seed: int,
        role: str,
        priority: int,
        replies: RecordedReplies | None = None,
    ) -> OpenSession:
        """Open the session of one role of one rollout. `replies` are those of its record, where it is rebuilt."""
        ...


class GuardedEnv:
    """A world whose foreign exceptions and answers become `EnvError` and whose time is measured. Implements
    `protocols.World`, and scores and closes the world.

    Args:
        make: makes the world, when it is first needed.
        watch: of this attempt; it compares what the world answers with the record, if there is one.

    Attributes:
        world_s: seconds spent inside the world.
    """

    def __init__(self, make: Callable[[], AnyEnv], watch: Watch | None = None) -> None:
        self._make = make
        self.watch = watch or Watch()
        self._made: AnyEnv | None = None
        self._roles = DEFAULT_ROLES
        self._observed: list[tuple[str, Observation]] = []
        self.world_s = 0.0

    @property
    def _env(self) -> AnyEnv:
        if self._made is None:
            with boundary(EnvError, "env"):
                self._made = self._make()
                self._roles = roles_of(self._made)
        return self._made

    @property
    def rebuildable(self) -> bool:
        """Whether the world answers the same when it is run again, as far as it says itself."""
        return bool(getattr(self._made, "rebuildable", True))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that the world names."""
        _ = self._env
        return self._roles

    @property
    def first_role(self) -> str:
        """The first of its roles; of a world that cannot be made, that of one that names none."""
        try:
            return self.roles[0]
        except EnvError:
            return DEFAULT_ROLES[0]

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The world's tools."""
        with boundary(EnvError, "env.tools"):
            return self._env.tools

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Open the world. Raises EnvError for whatever its code raises, and for what no model can be told."""
        with _Measured(self, "env.open"), self.watch.call("open"):
            if not getattr(self._env, "rebuildable", True):
                self.watch.refuse("the world says that it cannot be rebuilt")
            opened = _checked(await self._env.open(task, box))
        self._observed = [("", opened)]
        self.watch.observe("", opened)
        return opened

    async def step(self, reply: Message, role: str | None = None) -> Observation:
        """Answer a reply.

        Args:
            reply: what was said.
            role: who said it; may be left out where the world has one role.

        Raises:
            EnvError: its code raised, or answered with what no model can be told.
            BadInput: the world does not name the role.
        """
        role = self.named(role, "env.step")
        with _Measured(self, "env.step"), self.watch.call("step", role, reply):
            if len(self._roles) > 1:
                answer = await cast(RolesEnv, self._env).step_of(role, reply)
            else:
                answer = await cast(SingleEnv, self._env).step(reply)
            observation = _checked(answer)
        self._observed.append((role, observation))
        self.watch.observe(role, observation)
        return observation

    async def score(self, trajectories: Sequence[Trajectory]) -> Score | None:
        """Score a rollout, of a world of several roles all trajectories together. Raises EnvError for whatever the
        world's code raises, and for a reward that is no finite number; a JudgeError passes through."""
        with _Measured(self, "env.score"), self.watch.call("score"):
            if len(self.roles) > 1:
                by_role = {trajectory.role: trajectory for trajectory in trajectories}
                return _rated(await cast(RolesEnv, self._env).score_all(by_role), self._roles)
            return _rated(await cast(SingleEnv, self._env).score(trajectories[0]), self._roles)

    def named(self, role: str | None, where: str) -> str:
        """Return the role that was asked for; where none was, the only one of the world.

        Raises:
            BadInput: the world does not name it, or has several and none was asked for.
        """
        roles = self.roles
        if role is None and len(roles) == 1:
            return roles[0]
        if role not in roles:
            expected = f"a role of the environment ({', '.join(roles)})"
            do = "correct the harness (rollout.harness), or add the role to the environment's roles"
            raise refusal(where, expected, "none" if role is None else repr(role), do)
        return role

    def with_turns(self, score: Score, trajectories: Sequence[Trajectory]) -> Score:
        """Return the score with what observations said of each sampled turn, where it does not say so itself: the
        reward that answered it (0 where none did) and the state that it was taken in. It stays as it is where the world
        answered more replies of a role than were sampled: nobody then knows which.
        """
        rewards: dict[str, tuple[float, ...]] = {}
        states: dict[str, tuple[str | None, ...]] = {}
        for trajectory in trajectories:
            turns = sum(segment.model is not None and bool(segment.tokens) for segment in trajectory.segments)
            at = [place for place, (role, _) in enumerate(self._observed) if place and role == trajectory.role]
            if len(at) > turns:
                return score
            earned = [self._observed[place][1].reward or 0.0 for place in at]
            rewards[trajectory.role] = (*earned, *[0.0] * (turns - len(at)))
            keys = [self._observed[place - 1][1].state_key for place in at]
            if len(self._roles) == 1 and self._observed and len(at) < turns:  # the turn that nothing answered
                keys.append(self._observed[-1][1].state_key)
            states[trajectory.role] = (*keys, *[None] * (turns - len(keys)))
        answers = [observation for _, observation in self._observed]
        rewarded = any(answer.reward is not None for answer in answers[1:])
        in_states = any(answer.state_key is not None for answer in answers)
        if len(self._roles) > 1:
            if rewarded and score.per_role_turns is None:
                score = replace(score, per_role_turns=rewards)
            return replace(score, per_role_states=states) if in_states and score.per_role_states is None else score
        if rewarded and score.per_turn is None:
            score = replace(score, per_turn=rewards[trajectories[0].role])
        return replace(score, states=states[trajectories[0].role]) if in_states and score.states is None else score

    async def close(self) -> None:
        """Close the world, if there is one. Raises EnvError for whatever its code raises."""
        if self._made is not None:
            with _Measured(self, "env.close"):
                await self._made.close()


def _checked(answer: object) -> Observation:
    """Return the answer if it is an observation of text that UTF-8 (so tokenizer and store) can carry, whose reward
    adds up."""
    if not isinstance(answer, Observation):
        raise TypeError(f"expected an Observation, got {answer!r:.80}")
    if answer.reward is not None and not _is_finite(answer.reward):
        raise ValueError(f"expected a finite number as reward, got {answer.reward!r:.80}")
    for message in answer.messages:
        message.content.encode()
    return answer


def _rated(score: object, roles: Sequence[str]) -> Score | None:
    """Return the score if a baseline can be made with it."""
    if score is None:
        return None
    if not isinstance(score, Score):
        raise TypeError(f"expected a Score or None, got {score!r:.80}")
    rewards: dict[str, object] = {} if score.reward is None else {"": score.reward}
    for role, reward in {**rewards, **(score.per_role or {})}.items():
        if not _is_finite(reward):
            whose = f" of {role}" if role else ""
            raise ValueError(f"expected a finite number as reward{whose}, got {reward!r:.80}")
    of_roles = (score.per_role, score.per_role_turns, score.per_role_states)
    unnamed = sorted({role for of_role in of_roles for role in of_role or {}} - set(roles))
    if unnamed:
        raise ValueError(f"expected a score of the roles {', '.join(roles)}, got one of {unnamed[0]!r}")
    if len(roles) > 1 and (score.per_turn, score.per_step, score.states) != (None, None, None):
        raise ValueError("expected per_role_turns and per_role_states where there are several roles, got per_turn")
    return score


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


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
    """One attempt at one task: its world, its box and its sessions. Implements `protocols.Episode`. A session is
    opened when its role is first asked for."""

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
        self._sessions: dict[str, OpenSession] = {}

    def session(self, role: str | None = None) -> Session:
        """Return the session of a role; where the world has one role, that may be left out.

        Raises:
            BadInput: the world does not name the role.
        """
        return self._session(self.env.named(role, "episode.session"))

    def trajectories(self, outcome: Outcome, timing: Timing) -> tuple[Trajectory, ...]:
        """Return what was recorded: one trajectory per role that was asked, in the order in which the world names
        them; of the first role alone where nobody was asked. Each session adds its `generate_s` to `timing`.

        A role whose latest request hit a limit ended by that limit. The other roles did not.
        """
        cut = {role: outcome_at(session.limit) for role, session in self._sessions.items() if session.limit is not None}
        others = ANSWERED if outcome in cut.values() else outcome
        ended = cut if outcome.trainable else {}
        recorded = [
            session.trajectory(ended.get(role, others), timing) for role, session in self._in_order(self._sessions)
        ]
        asked = tuple(trajectory for trajectory in recorded if trajectory.segments)
        return asked or (self._session(self.env.first_role).trajectory(outcome, timing),)

    def transcripts(self) -> dict[str, Transcript]:
        """Return the conversation of each role that was asked, in messages."""
        spoken = {role: session.transcript() for role, session in self._in_order(self._sessions)}
        return {role: transcript for role, transcript in spoken.items() if transcript.messages}

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

    def _session(self, role: str) -> OpenSession:
        if role not in self._sessions:
            self._sessions[role] = self._recorder.open(
                self.task,
                rollout_id=self._rollout_id,
                seed=self._seed,
                role=role,
                priority=self._priority,
                replies=self.env.watch.replies,
            )
        return self._sessions[role]

    def _in_order(self, sessions: Mapping[str, OpenSession]) -> list[tuple[str, OpenSession]]:
        if len(sessions) < 2:
            return list(sessions.items())
        return [(role, sessions[role]) for role in self.env.roles if role in sessions]


def outcome_at(limit: LimitReached) -> Outcome:
    """Return the outcome of a conversation that a limit ended."""
    kind = "policy_failed" if limit.reason in ("resources", "malformed") else "truncated"
    return Outcome(kind=kind, reason=limit.reason)
