"""`GuestWorld`: the environment whose world lives in a guest, in OpenEnv's vocabulary: reset, step, close, and tools as
MCP lists and calls them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from sparring.envs.answers import finite
from sparring.envs.base import Env
from sparring.envs.executor import cooperative
from sparring.envs.guests.openenv import OpenEnvServer, OpenEnvSession
from sparring.envs.guests.pool import Guests
from sparring.envs.guests.process import Guest
from sparring.errors import EnvError
from sparring.protocols import Expert, Sandbox
from sparring.types import Message, Observation, Score, Task, ToolCall, ToolSpec, Trajectory


class WireObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a world to `reset` and `step`, as OpenEnv sends it; the last three are Sparring's own."""

    observation: Any = None
    """Text, or a dict with `text` or `messages`; any other value is shown as JSON."""

    reward: Any = None
    """Reward of the action; None is not 0."""

    done: bool = False
    """Whether the episode has ended."""

    role: str | None = None
    """Role that replies next; each answer of a world of several roles names one."""

    state_key: str | None = None
    """Name of the state in which the next reply is made."""

    failure: str | None = None
    """What broke in the world; such a rollout is played again, and never scored."""


def messages_of(observation: Any) -> tuple[Message, ...]:
    """Convert what a world shows to messages."""
    if isinstance(observation, Mapping):
        if "messages" in observation:
            return tuple(msgspec.convert(observation["messages"], tuple[Message, ...]))
        observation = observation.get("text", observation or None)
    if observation is None:
        return ()
    text = observation if isinstance(observation, str) else msgspec.json.encode(observation).decode()
    return (Message(role="user", content=text),)


class GuestWorld(Env):
    """World in a guest.

    Args:
        guests: guests of the recipe's `[env.guest]`.
        roles: names of its roles.
        settings: `[env.args]`, with which the adapter's `World` is made.
    """

    _numbers = itertools.count(1)

    @cooperative
    def __init__(self, guests: Guests | OpenEnvServer, roles: Sequence[str], settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._guests, self._settings = guests, settings
        declared = guests.constants
        self.rebuildable = bool(declared.get("REBUILDABLE", True))
        self.roles = tuple(roles)
        self._guest: Guest | OpenEnvSession | None = None
        self._number = next(self._numbers)
        self._methods: Sequence[str] = ()
        self._specs: tuple[ToolSpec, ...] = ()
        self._rewards: dict[str, float | None] = {}  # by role, once it has acted

    def generate(self, random: Random) -> Mapping[str, Any]:
        return {"seed": random.randrange(1 << 31)}

    def prompt(self, task: Task) -> Sequence[Message]:
        """Return no message: the world begins the conversation."""
        return ()

    def expert(self, task: Task) -> Expert | None:
        """Return the adapter's own demonstration: `expert(**task, **settings)` lists the replies."""
        if "expert" not in self._guests.functions:
            return None
        replies = self._guests.ask("expert", {**self._settings, **_shown(task)})
        return lambda messages: Message(role="assistant", content=replies[_answers(messages)])

    def key(self, task: Task) -> str:
        return str(next(task.data[name] for name in ("key", "seed", "id") if task.data.get(name) is not None))

    @property
    @cooperative
    def tools(self) -> tuple[ToolSpec, ...]:
        return self._specs

    @cooperative
    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        self.task = task
        self._guest = await self._guests.take(self._number)
        self._methods = await self._ask("make", **self._settings)
        answer = await self._ask("reset", **_shown(task))
        if "tools" in self._methods:
            self._specs = tuple(msgspec.convert(await self._ask("tools"), tuple[ToolSpec, ...]))
        return self._observed(answer)

    @cooperative
    async def step(self, reply: Message) -> Observation:
        return await self.step_of(self.roles[0], reply)

    @cooperative
    async def step_of(self, role: str, reply: Message) -> Observation:
        if reply.tool_calls:
            return _joined([await self._tool(role, call) for call in reply.tool_calls])
        return self._observed(await self._ask("step", action={"text": reply.content, "role": role}), role)

    @cooperative
    async def score(self, trajectory: Trajectory) -> Score | None:
        return await self.score_all({})

    @cooperative
    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score | None:
        if "score" in self._methods:
            return _score(self._guests.name, await self._ask("score"))
        earned, several = {role: self._rewards.get(role, 0.0) for role in self.roles}, len(self.roles) > 1
        known = {role: reward for role, reward in earned.items() if reward is not None}
        reward = sum(known.values()) / len(known) if len(known) == len(earned) else None
        at_least = self._guests.constants.get("SUCCESS_AT")
        success = None if at_least is None or reward is None or several else reward >= at_least - 1e-9
        return Score(reward=reward, success=success, per_role=known if several and reward is not None else None)

    @cooperative
    async def close(self) -> None:
        if self._guest is not None:
            await self._guest.leave(self._number)

    async def _tool(self, role: str, call: ToolCall) -> Observation:
        """Call one of the world's tools."""
        names = [spec.name for spec in self._specs]
        if call.name not in names:
            answer: Any = f"error: no tool {call.name!r}, there is {', '.join(names) or 'none'}"
        elif call.arguments is None:
            answer = f"error: {call.name}: expected arguments that are a JSON object"
        else:
            answer = await self._ask("call", name=call.name, arguments=call.arguments)
        seen = self._observed(answer if isinstance(answer, Mapping) else {"observation": answer}, role)
        text = "\n".join(message.content for message in seen.messages)
        message = Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
        return replace(seen, messages=(message,))

    async def _ask(self, method: str, **arguments: Any) -> Any:
        assert self._guest is not None, "open comes first"
        return await self._guest.call(method, self._number, arguments)

    def _observed(self, answer: Any, role: str = "") -> Observation:
        """Convert the answer to an action of a role; "": to `reset`.

        Raises:
            EnvError: it is none, its reward is no finite number, or the world says that it broke.
        """
        where = self._guests.name
        try:
            seen = msgspec.convert(answer, WireObservation)
            reward = None if seen.reward is None else finite("reward", seen.reward)
            messages = messages_of(seen.observation)
        except (msgspec.ValidationError, ValueError) as error:
            raise EnvError(f"{where}: expected an answer of a world: {error}") from error
        if seen.failure is not None:
            raise EnvError(f"{where}: {seen.failure}")
        if role:
            earned = self._rewards.get(role)
            self._rewards[role] = earned if reward is None else (earned or 0.0) + reward
        return Observation(messages=messages, reward=reward, done=seen.done, state_key=seen.state_key, role=seen.role)


def _joined(seen: Sequence[Observation]) -> Observation:
    """Join the answers to the calls of one reply."""
    rewards = [each.reward for each in seen if each.reward is not None]
    return Observation(
        messages=tuple(message for each in seen for message in each.messages),
        reward=sum(rewards) if rewards else None,
        done=any(each.done for each in seen),
        state_key=seen[-1].state_key,
        role=seen[-1].role,
    )


def _score(where: str, score: Any) -> Score:
    """Convert a world's own score. Raises EnvError if it is none."""
    try:
        return msgspec.convert(score, Score)
    except msgspec.ValidationError as error:
        raise EnvError(f"{where}: expected a score: {error}") from error


def _shown(task: Task) -> Mapping[str, Any]:
    """Return what an adapter gets of a task: its seed, and its data without our key."""
    return {"seed": task.seed, **{name: value for name, value in task.data.items() if name != "key"}}


def _answers(messages: Sequence[Message]) -> int:
    """Count the replies of a conversation."""
    return sum(message.role == "assistant" for message in messages)
