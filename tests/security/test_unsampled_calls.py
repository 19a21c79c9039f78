"""A world's tools run what the model asked for: a call that no reply holds is refused, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from sparring.errors import UnsampledCall
from sparring.gateway.server import Door, open_door
from sparring.generation import Completion
from sparring.harness.program import ProgramRequests
from sparring.harness.world_tools import SampledCalls, WorldTools, are_equal
from sparring.observe.metrics import Metrics
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.reply import ReplyRequest
from sparring.rollout.metrics import HarnessEnds
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, Observation, ToolCall, ToolSpec

RENDERER = toy_renderer()
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number", "default": 2}, "c": {"type": "object"}},
}
ADD = ToolSpec(name="add", description="Add.", parameters=SCHEMA)
QUICK = ToolSpec(name="quick_add", description="Add at once.", parameters=SCHEMA)
SHOWN = [
    {"type": "function", "function": {"name": name, "description": "Add.", "parameters": SCHEMA}}
    for name in ("add", "mcp__world__add", "world-add")
]


class Adding:
    """A world whose tool adds; it counts what runs."""

    tools = (ADD, QUICK)
    roles = ("policy",)

    def __init__(self) -> None:
        self.ran: list[dict[str, Any]] = []

    async def step(self, reply: Message, role: str | None = None) -> Observation:
        (call,) = reply.tool_calls
        self.ran.append(dict(call.arguments or {}))
        await asyncio.sleep(0)
        return Observation(messages=(Message(role="tool", content=f"sum {len(self.ran)}", tool_call_id=call.id),))


def said(*calls: tuple[str, Any], content: str = "") -> Message:
    made = tuple(ToolCall(id=f"call_{n}", name=name, arguments=a) for n, (name, a) in enumerate(calls))
    return Message(role="assistant", content=content, tool_calls=made)


class Program:
    """A program at the door of one rollout: asks the model, and calls tools, whatever the model said."""

    def __init__(self, client: httpx.AsyncClient, door: Door) -> None:
        self.client, self.door = client, door
        self.headers = {"x-api-key": door.key}
        self._id = 0

    async def asks(self, *messages: Any, stream: bool = False) -> dict[str, Any]:
        body = {"model": "policy", "messages": [{"role": "user", "content": "Go."}, *messages], "tools": SHOWN}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=self.headers)
        return answer.json() if answer.status_code != 200 else answer.json()["choices"][0]["message"]

    async def calls(self, name: str = "add", **arguments: Any) -> tuple[bool, str]:
        """Whether a call was refused, and what came."""
        self._id += 1
        parameters = {"name": name, "arguments": arguments}
        body = {"jsonrpc": "2.0", "id": self._id, "method": "tools/call", "params": parameters}
        result = (await self.client.post("/mcp", json=body, headers=self.headers)).json()["result"]
        return result["isError"], result["content"][0]["text"]


def played(
    talk: Callable[[Program], Awaitable[Any]], *replies: Message, most: int = 20, from_code: bool = False
) -> tuple[Any, Adding, ProgramRequests]:
    """What came of a program's doings, the world, and the session."""

    async def main() -> tuple[Any, Adding, ProgramRequests]:
        left, world = iter(replies), Adding()
        engine = ScriptedEngine(lambda request: reply_tokens(RENDERER, next(left), [ADD]))
        limits = Limits(max_turns=20, max_tokens=4000, max_tool_calls=most)
        recorder = Recorder(engine, RENDERER, max_context=3000)
        calls = SampledCalls(most, from_code=from_code)
        session = recorder.open(toy_task(), rollout_id="rl/0/0", seed=7, limits=limits)
        requests = ProgramRequests(session, calls)
        session.add_layer(requests)
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url, timeout=30) as client:
            door.tools = WorldTools(world, calls)
            return await talk(Program(client, door)), world, requests

    return asyncio.run(main())


def test_a_command_that_calls_a_tool_in_a_loop_gets_no_answer_that_the_model_did_not_ask_for() -> None:
    """Five hundred calls in one turn, as `curl` in a shell command makes them; three are allowed, one was sampled."""

    async def talk(program: Program) -> list[tuple[bool, str]]:
        await program.asks()
        return [await program.calls(a=guess) for guess in range(500)]

    answers, world, session = played(talk, said(("add", {"a": 7})), most=3)
    assert world.ran == [{"a": 7}], "the call that was sampled, once"
    assert [n for n, (refused, _) in enumerate(answers) if not refused] == [7]
    assert "calls_from_code" in answers[8][1] and session.calls.unsampled == 499
    assert (session.session.usage.tool_calls, session.calls.count) == (1, 1)


def test_equal_calls_run_as_often_as_they_were_sampled_side_by_side_too() -> None:
    async def talk(program: Program) -> list[tuple[bool, str]]:
        await program.asks()
        return sorted(await asyncio.gather(*(program.calls(a=1) for _ in range(4))))

    answers, world, _ = played(talk, said(("add", {"a": 1}), ("mcp__world__add", {"b": 2.0, "a": 1.0})))
    assert [refused for refused, _ in answers] == [False, False, True, True] and len(world.ran) == 2


def test_a_call_lapses_when_its_agent_goes_on_and_not_when_another_does() -> None:
    async def talk(program: Program) -> list[bool]:
        first = await program.asks()
        await program.asks({"role": "user", "content": "Another agent."})
        (call,) = first["tool_calls"]
        await program.asks(first, {"role": "tool", "tool_call_id": call["id"], "content": "It timed out."})
        return [(await program.calls(a=a))[0] for a in (1, 2, 3)]

    replies = [said(("add", {"a": a})) for a in (1, 2, 3)]
    assert played(talk, *replies)[0] == [True, False, False]


def test_a_call_that_does_not_parse_is_none() -> None:
    calls = SampledCalls(9)
    calls.offer("rl/0/0#1", 0, ToolCall(id="call_0", name="add", arguments=None, raw='{"a": 1'))
    for arguments in ({}, {"a": 1}):
        with pytest.raises(UnsampledCall, match="add: expected a call that the last reply of an agent holds"):
            calls.claim(ToolCall(id="", name="add", arguments=arguments), (ADD,))


def test_calls_beyond_the_limit_do_not_run_though_a_reply_holds_them() -> None:
    async def talk(program: Program) -> list[tuple[bool, str]]:
        await program.asks()
        return [await program.calls(a=a) for a in range(5)]

    answers, world, session = played(talk, said(*(("add", {"a": a}) for a in range(5))), most=3)
    assert [refused for refused, _ in answers] == [False] * 3 + [True] * 2
    assert "more than 3 tool calls" in answers[3][1] and len(world.ran) == 3 and session.calls.unsampled == 0


def test_calls_of_code_that_the_model_writes_run_where_the_recipe_says_so_and_are_counted() -> None:
    async def talk(program: Program) -> tuple[list[bool], dict[str, Any]]:
        await program.asks()
        answers = [await program.calls(a=a) for a in range(5)]
        return [refused for refused, _ in answers], await program.asks({"role": "user", "content": "And on."})

    (refused, then), world, session = played(talk, said(content="for a in range(5): add(a)"), most=3, from_code=True)
    assert refused == [False] * 3 + [True] * 2 and len(world.ran) == 3
    assert (
        "max_tool_calls" in str(session.limit and session.limit.reason) and "3 tool calls" in then["error"]["message"]
    )


def test_a_reply_that_its_client_lost_is_answered_as_before_and_the_world_is_asked_once() -> None:
    async def main() -> list[str]:
        world, calls = Adding(), SampledCalls(9)
        tools, call = WorldTools(world, calls), ToolCall(id="call_0", name="add", arguments={"a": 1})
        calls.offer("rl/0/0#1", 0, call)
        answers = [await tools.call(call)]
        calls.reopen("rl/0/0#1")
        answers += await asyncio.gather(tools.call(call), tools.call(call), return_exceptions=True)
        return [*map(str, answers), str(len(world.ran))]

    first, again, third, ran = asyncio.run(main())
    assert first == again == "sum 1" and ran == "1" and third.startswith("add: expected a call")


class Slow:
    """An engine whose stream stops behind the call until it may go on."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.inner, self.goes_on = ScriptedEngine(lambda request: tokens), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def stream(self, request: Any) -> Any:
        async for piece in self.inner.stream(request):
            if isinstance(piece, Completion):
                await self.goes_on.wait()
            yield piece


def test_a_call_may_run_when_it_is_shown_before_the_reply_ends() -> None:
    async def main() -> tuple[str, int]:
        engine, calls = Slow(reply_tokens(RENDERER, said(("add", {"a": 1})), [ADD])), SampledCalls(9)
        session = Recorder(engine, RENDERER, max_context=3000).open(toy_task(), rollout_id="r", seed=1)
        session.add_layer(ProgramRequests(session, calls))
        tools = WorldTools(Adding(), calls)
        async for part in session.reply(ReplyRequest([Message(role="user", content="Go.")], [ADD], in_pieces=True)):
            if getattr(part, "call", None) is not None:
                answer = await tools.call(ToolCall(id="", name="add", arguments={"a": 1}))
                engine.goes_on.set()
        return answer, len(calls._open)

    assert asyncio.run(main()) == ("sum 1", 0), "and the end of the reply offers it no second time"


@pytest.mark.parametrize(
    ("sampled", "sent", "equal"),
    [
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1, "b": 3}, {"b": 3, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2.0}, {"a": 1}, True),
        ({"a": 1, "wait": True}, {"a": 1}, True),
        ({"a": 1e16}, {"a": 10**16}, True),
        ({"a": 1}, {"a": 1, "wait": True}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": 1}, {"a": 1, "b": 3}, False),
        ({"a": 1}, {}, False),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ({"c": {"x": [1, 2]}}, {"c": {"x": [1.0, 2]}}, True),
        ({"c": {"x": [1, 2]}}, {"c": {"x": [2, 1]}}, False),
    ],
)
def test_arguments_are_equal_as_values_after_defaults(sampled: Any, sent: Any, equal: bool) -> None:
    one, other = (ToolCall(id="", name="add", arguments=arguments) for arguments in (sampled, sent))
    assert are_equal(one, other, SCHEMA) is equal


def test_calls_that_did_not_run_are_counted_and_the_first_are_reported() -> None:
    metrics, said = Metrics(), list[str]()
    ends = HarnessEnds(metrics, said.append)
    for number in (0, 499, 1):
        ends.take("program", "rl/0/0", {"failed": False, "unsampled_calls": number})
    assert metrics.take()["rollout/unsampled_calls"] == 500
    (sentence,) = said
    assert sentence.startswith("rl/0/0: 499 calls") and "rollout.calls_from_code" in sentence
