"""Tools of a world for a program, restricted to the calls that its model sampled.

A program calls tools by MCP (`/mcp`) with the key of its rollout, and so may any command in its box. So a call runs
only if a reply of the rollout contains it: it is then recorded, sampled and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparring.errors import EnvError, LimitReached, UnsampledCall, boundary
from sparring.protocols import World
from sparring.record.identity import arguments_key
from sparring.record.tool_names import tool_meant
from sparring.types import Message, ToolCall, ToolSpec


@dataclass(eq=False, slots=True)
class HeldCall:
    """Tool call in a reply.

    Attributes:
        number: number of the call in its rollout, from 1.
        answer: answer of the world; None before the call has run.
    """

    call: ToolCall
    number: int
    answer: str | None = None


class SampledCalls:
    """Account of a rollout's tool calls: each sampled call may run once, until the agent continues its conversation.

    Args:
        from_code: whether the model writes code that calls tools. Such calls are in no reply, but they count.

    Attributes:
        count: number of calls so far, in replies and from code.
        unsampled: number of calls that were refused because no reply contains them.
        when_over: called with the limit when a call from code exceeds the maximum.
    """

    def __init__(self, most: int, *, from_code: bool = False) -> None:
        self.count = self.unsampled = 0
        self.when_over: Callable[[LimitReached], None] = lambda limit: None
        self._most, self._from_code = most, from_code
        self._all: dict[tuple[str, int], HeldCall] = {}
        self._open: dict[tuple[str, int], HeldCall] = {}
        self._ids: set[str] = set()

    def offer(self, reply: str, at: int, call: ToolCall) -> None:
        """Allow one run of the call at place `at` of a reply, as the client sees it. Called once the client may have
        seen it. Arguments that did not parse match no call."""
        if (reply, at) not in self._all:  # a turn sampled again after an engine failure has the same calls
            self.count += 1
            self._all[reply, at] = HeldCall(call, self.count)
            self._ids.add(call.id)
        self._open[reply, at] = self._all[reply, at]

    def reopen(self, reply: str) -> None:
        """Allow the calls of a reply again, because the client lost the reply and may receive it once more. Calls that
        have run keep their answer."""
        self._open |= {place: sampled for place, sampled in self._all.items() if place[0] == reply}

    def go_on(self, messages: Sequence[Message]) -> None:
        """Disallow the calls in the messages of a new request, because the agent has continued its conversation after
        them."""
        for message in reversed(messages):
            if not self._open:
                return
            for call in message.tool_calls:
                self._leave(call)

    def _leave(self, call: ToolCall) -> None:
        """Disallow a call that a client sends back, found by its id, or else by its name and arguments."""
        if call.id in self._ids:
            places = [place for place, sampled in self._open.items() if sampled.call.id == call.id]
        elif call.arguments is None:
            return
        else:
            key = arguments_key(call.arguments)
            places = [
                place
                for place, sampled in self._open.items()
                if sampled.call.name == call.name and arguments_key(sampled.call.arguments or {}) == key
            ]
        for place in places[:1]:
            del self._open[place]

    def claim(self, call: ToolCall, tools: Sequence[ToolSpec]) -> HeldCall:
        """Return the sampled call that a program's call matches, and use it up.

        Raises:
            UnsampledCall: no reply contains the call.
        """
        names = [tool.name for tool in tools]
        schema = next((tool.parameters for tool in tools if tool.name == call.name), {})
        for place, sampled in self._open.items():
            if tool_meant(sampled.call.name, names) == call.name and are_equal(sampled.call, call, schema):
                del self._open[place]
                self._check(sampled.number)
                return sampled
        if not self._from_code:
            self.unsampled += 1
            raise UnsampledCall(
                f"{call.name}: expected a call that the last reply of an agent holds and that nobody has run, got "
                "another; let the model call the tool, or set calls_from_code = true where it writes code that does"
            )
        self.count += 1
        self._check(self.count, from_code=True)
        return HeldCall(call, self.count)

    def _check(self, number: int, *, from_code: bool = False) -> None:
        """Raise LimitReached for a call beyond the maximum."""
        if number > self._most:
            limit = LimitReached("max_tool_calls", f"more than {self._most} tool calls")
            if from_code:  # the session knows of calls in replies
                self.when_over(limit)
            raise limit


class WorldTools:
    """Tools of a world that a program calls by MCP, one call after another, because the world takes one reply at a
    time. Implements `protocols.ToolHost`."""

    def __init__(self, env: World, calls: SampledCalls) -> None:
        self._env, self._calls = env, calls
        self._turn = asyncio.Lock()
        self._num_run = 0
        self.done = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return self._env.tools

    async def call(self, call: ToolCall) -> str:
        """Run a tool and return its answer.

        Raises:
            UnsampledCall: no reply of the rollout contains the call, or it has run.
            EnvError: the world failed.
            LimitReached: the policy's commands exceeded their time, or the rollout its number of calls.
        """
        sampled = self._calls.claim(call, self.tools)  # before the lock, so in the order of arrival
        async with self._turn:
            if sampled.answer is not None:
                return sampled.answer
            if self.done:
                return "error: the task is over"
            self._num_run += 1
            named = replace(call, id=f"call_{self._num_run}")
            with boundary(EnvError, f"tool {call.name}"):
                observation = await self._env.step(Message(role="assistant", tool_calls=(named,)))
            self.done = observation.done
            sampled.answer = "\n".join(message.content for message in observation.messages) or "done"
            return sampled.answer

    async def answer(self, reply: Message, of: Message | None = None) -> None:
        """Pass the program's last reply to the world, unless it has ended.

        Args:
            of: policy's reply from which the program derived `reply`; None: `reply` itself is the policy's.

        Raises:
            EnvError: the world failed.
        """
        if not self.done:
            with boundary(EnvError, "step"):
                self.done = (await self._env.step(reply, of=of)).done


def are_equal(sampled: ToolCall, sent: ToolCall, schema: Mapping[str, Any]) -> bool:
    """Return whether a program's call has the sampled arguments.

    Numbers are compared as JSON's (1 equals 1.0), and keys in any order. An omitted argument has the default of
    `schema`, the JSON schema of the tool's arguments. A client may drop arguments that the schema does not name.
    """
    if sampled.arguments is None or sent.arguments is None:
        return False
    before, after = _with_defaults(sampled.arguments, schema), _with_defaults(sent.arguments, schema)
    named = schema.get("properties")
    if isinstance(named, Mapping):
        before = {name: value for name, value in before.items() if name in named or name in after}
    return arguments_key(before) == arguments_key(after)


def _with_defaults(value: Any, schema: Any) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(properties, Mapping):
        return value
    filled = {name: _with_defaults(item, properties.get(name)) for name, item in value.items()}
    for name, part in properties.items():
        if name not in filled and isinstance(part, Mapping) and "default" in part:
            filled[name] = part["default"]
    return filled
