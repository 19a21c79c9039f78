"""A world's tools as a program calls them: what runs is what its model asked for.

A program calls tools by MCP (`/mcp`) under the key of its rollout, and so does every command in its box. So a call runs
only where a reply of the rollout holds it: then it is in the record, was sampled, and is counted.
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
    """Call that a reply holds.

    Attributes:
        call: as it was sampled.
        number: of the call among all of its rollout, from 1 on.
        answer: of the world; None before there is one.
    """

    call: ToolCall
    number: int
    answer: str | None = None


class SampledCalls:
    """Account of the calls of a rollout: each that a reply holds may run once, until its agent goes on.

    Args:
        most: calls that the rollout may make.
        from_code: whether the model writes code that calls tools, so that calls are in no reply; they are counted all
            the same.

    Attributes:
        count: calls so far: those of replies, and those from code.
        unsampled: calls that were refused since no reply held them.
        when_over: called with the limit of calls where one from code has hit it.
    """

    def __init__(self, most: int, *, from_code: bool = False) -> None:
        self.count = self.unsampled = 0
        self.when_over: Callable[[LimitReached], None] = lambda limit: None
        self._most, self._from_code = most, from_code
        self._all: dict[tuple[str, int], HeldCall] = {}
        self._open: dict[tuple[str, int], HeldCall] = {}
        self._ids: set[str] = set()

    def offer(self, reply: str, at: int, call: ToolCall) -> None:
        """Let a call run that a reply holds, from when its client may have seen it.

        Args:
            reply: its id.
            at: place of the call among those of the reply.
            call: as the client is shown it. Arguments that did not parse are those of no call.
        """
        if (reply, at) not in self._all:  # a turn that is sampled again, since its engine failed, has the same calls
            self.count += 1
            self._all[reply, at] = HeldCall(call, self.count)
            self._ids.add(call.id)
        self._open[reply, at] = self._all[reply, at]

    def reopen(self, reply: str) -> None:
        """Let the calls of a reply be asked for again: its client has lost it, and may be given it once more. Those
        that have run are answered as before."""
        self._open |= {place: held for place, held in self._all.items() if place[0] == reply}

    def go_on(self, messages: Sequence[Message]) -> None:
        """Let no call run any longer that an agent leaves behind: its conversation goes on past the reply."""
        for message in reversed(messages):
            if not self._open:
                return
            for call in message.tool_calls:
                self._leave(call)

    def _leave(self, call: ToolCall) -> None:
        """Forget an open call that a client sends back, by its id, or under an id of its own by what it says."""
        if call.id in self._ids:
            left = [place for place, held in self._open.items() if held.call.id == call.id]
        elif call.arguments is None:
            return
        else:
            key = arguments_key(call.arguments)
            left = [
                place
                for place, held in self._open.items()
                if held.call.name == call.name and arguments_key(held.call.arguments or {}) == key
            ]
        for place in left[:1]:
            del self._open[place]

    def claim(self, call: ToolCall, tools: Sequence[ToolSpec]) -> HeldCall:
        """Return the call of a reply that a program's call is, which is used up by it.

        Args:
            call: of the program.
            tools: of the world.

        Raises:
            UnsampledCall: no reply holds it.
            LimitReached: the rollout has made more calls than it may.
        """
        names = [tool.name for tool in tools]
        schema = next((tool.parameters for tool in tools if tool.name == call.name), {})
        for place, held in self._open.items():
            if tool_meant(held.call.name, names) == call.name and are_equal(held.call, call, schema):
                del self._open[place]
                self._check(held.number)
                return held
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
        """Raise LimitReached for a call beyond the last one that may run."""
        if number > self._most:
            limit = LimitReached("max_tool_calls", f"more than {self._most} tool calls")
            if from_code:  # of those in replies, the session knows
                self.when_over(limit)
            raise limit


class WorldTools:
    """Tools of a world that a program calls by MCP. Implements `protocols.ToolHost`. Calls run one after another, for
    the world takes one reply at a time.

    Args:
        env: has the tools.
        calls: of the rollout.

    Attributes:
        done: whether the world has ended.
    """

    def __init__(self, env: World, calls: SampledCalls) -> None:
        self._env, self._calls = env, calls
        self._turn = asyncio.Lock()
        self._begun = 0
        self.done = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools as they are now."""
        return self._env.tools

    async def call(self, call: ToolCall) -> str:
        """Run a tool and return its answer.

        Raises:
            UnsampledCall: no reply of the rollout holds the call, or it has run.
            EnvError: the world broke.
            LimitReached: the policy's own commands have taken too long, or the rollout has made too many calls.
        """
        held = self._calls.claim(call, self.tools)  # in the order in which calls come
        async with self._turn:
            if held.answer is not None:
                return held.answer
            if self.done:
                return "error: the task is over"
            self._begun += 1
            named = replace(call, id=f"call_{self._begun}")
            with boundary(EnvError, f"tool {call.name}"):
                observation = await self._env.step(Message(role="assistant", tool_calls=(named,)))
            self.done = observation.done
            held.answer = "\n".join(message.content for message in observation.messages) or "done"
            return held.answer

    async def answer(self, reply: Message, of: Message | None = None) -> None:
        """Give the world the program's last reply, unless it has ended.

        Args:
            reply: what the program has to say in the end.
            of: the policy's reply that it made this of; None: it is one.

        Raises:
            EnvError: the world broke.
        """
        if not self.done:
            with boundary(EnvError, "step"):
                self.done = (await self._env.step(reply, of=of)).done


def are_equal(sampled: ToolCall, sent: ToolCall, schema: Mapping[str, Any]) -> bool:
    """Return whether a program's call has the arguments that were sampled.

    Numbers are compared as JSON's (1 is 1.0), keys in any order. What one of the two leaves out is its default in the
    schema. What the schema does not name is the client's own, which may leave it out.

    Args:
        sampled: call of a reply.
        sent: call of the program.
        schema: of the tool's arguments.
    """
    if sampled.arguments is None or sent.arguments is None:
        return False
    before, after = _filled(sampled.arguments, schema), _filled(sent.arguments, schema)
    named = schema.get("properties")
    if isinstance(named, Mapping):
        before = {name: value for name, value in before.items() if name in named or name in after}
    return arguments_key(before) == arguments_key(after)


def _filled(value: Any, schema: Any) -> Any:
    """Return plain data with the defaults of what it leaves out."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(properties, Mapping):
        return value
    filled = {name: _filled(item, properties.get(name)) for name, item in value.items()}
    for name, part in properties.items():
        if name not in filled and isinstance(part, Mapping) and "default" in part:
            filled[name] = part["default"]
    return filled
