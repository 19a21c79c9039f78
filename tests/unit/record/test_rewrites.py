"""Clients that rewrite, fork, cancel and talk side by side: a branch's ids are those that the engine saw, each sampled
id stands in the record once, and only an edit leaves a branch."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from conversations import SYSTEM, TOOL
from hypothesis import example, given, settings
from hypothesis import strategies as st
from virtual import on_virtual_clock

from sparring.generation import Completion, GenerateRequest, Sampling
from sparring.record.identity import UNREAD, shown_arguments
from sparring.record.order import conversation, settled, tools_of
from sparring.record.recorder import RecordedSession, Recorder
from sparring.reply import ReplyRequest, SampledReply, whole_reply
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Evidence, Limits, Message, Segment, ToolCall, ToolSpec

RENDERER = toy_renderer(thinking=True, thoughts="kept")
LIMITS = Limits(max_turns=1000, max_tokens=1_000_000, max_tool_calls=1000)
TOOLS = (TOOL, replace(TOOL, name="search"))


@functools.cache
def said(number: int) -> tuple[int, ...]:
    """The ids of reply `number`: with a thought, calls, a malformed call, or none of these."""
    thought = f"<think>\nhm {number}\n</think>\n\n" if number % 3 else "<think>\n\n</think>\n\n"
    call = '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}", "n": {}}}}}\n</tool_call>'
    calls = [call.format(f"{number}{at}", 10_000 + number) for at in range(number % 4)]
    broken = ['<tool_call>\n{"name": "python", "argum\n</tool_call>'] if number % 5 == 4 else []
    text = thought + "\n".join([f"Text {number}.", *broken, *calls])
    added = RENDERER.tokenizer.added_tokens
    ids: list[int] = []
    while text:  # markers are ids of their own, as a model samples them
        at, marker = min(((text.find(m), m) for m in added if m in text), default=(len(text), ""))
        ids += [*RENDERER.tokenizer.encode(text[:at]), *([added[marker]] if marker else [])]
        text = text[at + len(marker) :]
    return tuple(ids)


class Engine(ScriptedEngine):
    """An engine that says the next reply, and whose requests end when they are let."""

    def __init__(self) -> None:
        super().__init__(lambda request: said(len(self.requests)))
        self.completed: list[tuple[str, Completion]] = []
        self.gates: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Answer once its gate is open."""
        await self.gates.setdefault(request.id, asyncio.Event()).wait()
        completion = await super().generate(request)
        self.completed.append((request.id, completion))
        return completion


@dataclass
class Talk:
    """A client's conversation. `goes_on` is the reply that the next request continues; None after an edit."""

    messages: list[Message]
    agent: str = ""
    goes_on: str | None = None
    edited_from: str | None = None
    tools: tuple[ToolSpec, ...] = TOOLS
    asked: list[asyncio.Task[SampledReply]] = field(default_factory=list)


def each(change: Callable[[Message], list[Message]]) -> Callable[[Talk], None]:
    """A rewriting of every reply."""

    def rewrite(talk: Talk) -> None:
        talk.messages = [part for m in talk.messages for part in (change(m) if m.role == "assistant" else [replace(m)])]

    return rewrite


def renumber(talk: Talk) -> None:
    """The client has its own ids of calls."""
    names: dict[str, str] = {}

    def own(id: str) -> str:
        return names.setdefault(id, f"toolu_{len(names)}")

    talk.messages = [
        replace(
            m,
            tool_calls=tuple(replace(c, id=own(c.id)) for c in m.tool_calls),
            tool_call_id=m.tool_call_id and own(m.tool_call_id),
        )
        for m in talk.messages
    ]


def malformed_as_text(talk: Talk) -> None:
    """A malformed call as text, behind that of its reply, as in a dialect that has no place for it."""
    shown: list[Message] = []
    for message in talk.messages:
        raw = "".join(call.raw for call in message.tool_calls if call.arguments is None)
        if raw:
            calls = tuple(call for call in message.tool_calls if call.arguments is not None)
            text = shown.pop() if shown[-1].role == "assistant" else Message(role="assistant")
            text = replace(text, content=text.content.strip() + message.content.strip() + raw)
            message = replace(message, content=text.content, reasoning=text.reasoning or message.reasoning)
            message = replace(message, tool_calls=text.tool_calls + calls)
        shown.append(message)
    talk.messages = shown


def malformed_as_shown(message: Message) -> list[Message]:
    """A malformed call as it is shown where arguments are no text."""
    shown = [
        call if call.arguments is not None else replace(call, arguments=shown_arguments(call), raw="")
        for call in message.tool_calls
    ]
    return [replace(message, tool_calls=tuple(shown))]


def as_javascript(message: Message) -> list[Message]:
    """Numbers as doubles, keys in another order."""
    return [
        replace(
            message,
            tool_calls=tuple(
                call
                if call.arguments is None
                else replace(
                    call,
                    arguments={k: float(v) if isinstance(v, int) else v for k, v in reversed(call.arguments.items())},
                )
                for call in message.tool_calls
            ),
        )
    ]


def split(message: Message) -> list[Message]:
    """The text and each call apart."""
    return [
        *([replace(message, tool_calls=())] if message.content.strip() or not message.tool_calls else []),
        *(Message(role="assistant", tool_calls=(call,)) for call in message.tool_calls),
    ]


def interleave(talk: Talk) -> None:
    """Each call before its answer."""
    rewritten: list[Message] = []
    calls: dict[str, ToolCall] = {}
    for message in talk.messages:
        if message.role == "assistant":
            parsed = [call for call in message.tool_calls if call.arguments is not None]
            calls = {call.id: call for call in parsed[1:]}
            keep = tuple(call for call in message.tool_calls if call.id not in calls)
            message = replace(message, tool_calls=keep)
        elif message.role == "tool" and message.tool_call_id in calls:
            rewritten.append(Message(role="assistant", tool_calls=(calls.pop(message.tool_call_id),)))
        rewritten.append(message)
    talk.messages = rewritten if not calls else talk.messages


def other_tools(talk: Talk) -> None:
    """The same tools in another order, and their schemas' keys too, at every depth."""

    def turned(schema: Any) -> Any:
        return {key: turned(inner) for key, inner in reversed(schema.items())} if isinstance(schema, dict) else schema

    talk.tools = tuple(replace(tool, parameters=turned(tool.parameters)) for tool in reversed(talk.tools))


REWRITES: dict[str, Callable[[Talk], None]] = {
    "copied": each(lambda m: [replace(m)]),
    "thoughts dropped": each(lambda m: [replace(m, reasoning=None)]),
    "blanks": each(lambda m: [replace(m, content=f" {m.content}\n")]),
    "as JavaScript writes": each(as_javascript),
    "malformed as text": malformed_as_text,
    "malformed as shown": each(malformed_as_shown),
    "split": each(split),
    "interleaved": interleave,
    "renumbered": renumber,
    "tools": other_tools,
}


def edit(talk: Talk, choice: int) -> None:
    """Change, leave out or put in something that is no matter of form."""
    last = max((at for at, message in enumerate(talk.messages) if message.role == "assistant"), default=1)
    at = choice % (last + 1)
    message, kind = talk.messages[at], choice // 8 % 3
    parsed = [call for call in message.tool_calls[:1] if call.arguments is not None and UNREAD not in call.arguments]
    if kind == 0 and parsed:
        first, *others = message.tool_calls
        added = [*first.arguments.get("added", ()), choice]  # another edit each time
        changed = replace(first, arguments={**first.arguments, "added": added})
        talk.messages[at] = replace(message, tool_calls=(changed, *others))
    elif kind == 1 or message.role == "tool":  # its answers may stand between the parts of the last reply
        talk.messages.insert(at, Message(role="user", content=f"Put in {choice}."))
    else:
        talk.messages[at] = replace(message, content=f"{message.content} edited {choice}")
    talk.edited_from, talk.goes_on = talk.goes_on, None


class World:
    """A session, its clients and what they do."""

    def __init__(self, store: SqliteStore | None = None) -> None:
        self.engine = Engine()
        recorder = Recorder(self.engine, RENDERER, store, sampling=Sampling(max_tokens=400), max_context=1_000_000)
        self.asked: dict[str, tuple[Talk, list[Message], tuple[ToolSpec, ...]]] = {}
        self.session: RecordedSession = recorder.open(toy_task(limits=LIMITS), rollout_id="r", seed=7)
        self.talks = [Talk([SYSTEM, Message(role="user", content="Begin.")])]
        self.number = 0

    async def act(self, action: str, choice: int) -> None:
        """Do one thing."""
        self.number += 1
        talk = self.talks[choice % len(self.talks)]
        if action == "agent":
            self.talks.append(Talk([SYSTEM, Message(role="user", content="Look.")], agent=f"agent {self.number}"))
        elif action == "ask":
            for _ in range(1 + (choice % 7 == 0) if not talk.asked else 0):
                ask = whole_reply(
                    self.session.reply(
                        ReplyRequest(list(talk.messages), talk.tools, evidence=Evidence(agent=talk.agent))
                    )
                )
                talk.asked.append(asyncio.create_task(ask))
                await asyncio.sleep(0)
        elif action == "cancel" and talk.asked:
            talk.asked.pop(choice % len(talk.asked)).cancel()
            await asyncio.sleep(0)
        elif action == "answer":
            await self.answer(choice)
        elif not talk.asked and action == "edit":
            edit(talk, choice)
        elif not talk.asked and action in REWRITES:
            REWRITES[action](talk)

    async def answer(self, choice: int) -> None:
        """Let one request end, and its client go on."""
        waiting = [talk for talk in self.talks if talk.asked]
        if not waiting:
            return
        talk = waiting[choice % len(waiting)]
        asked, talk.asked = talk.asked, []
        for gate in self.engine.gates.values():
            gate.set()
        self.check(talk, replies := [await task for task in asked])
        self.asked.update((reply.id, (talk, list(talk.messages), talk.tools)) for reply in replies)
        reply = replies[-1]
        for other in replies[: choice % 2 and -1]:  # what its client goes on from was delivered
            self.session.deliver(other.id, False)
        answers = [
            Message(role="tool", content=f"answer {self.number}", tool_call_id=call.id, name=call.name)
            for call in reply.message.tool_calls
            if call.arguments is not None
        ]
        if not answers or choice % 3 == 0:
            answers.append(Message(role="user", content=f"Go on {self.number}."))
        talk.messages += [reply.message, *answers]
        talk.goes_on, talk.edited_from = reply.id, None

    def check(self, talk: Talk, replies: list[SampledReply]) -> None:
        """Only an edit leaves a branch."""
        segments = self.session.segments
        for reply in replies:
            segment = self.by_id(segments)[reply.id]
            start = segments[segment.parent]
            assert segment.tokens == reply.tokens
            if talk.goes_on is not None:
                assert start.parent == self.by_id(segments)[talk.goes_on].index, talk
            elif talk.edited_from is not None:
                assert start.parent != self.by_id(segments)[talk.edited_from].index
                assert start.fork is not None and start.fork.before != start.fork.after

    def by_id(self, segments: tuple[Segment, ...]) -> dict[str, Segment]:
        """The replies by their ids."""
        return {f"r#{s.index if s.place is None else s.place}": s for s in segments if s.model}

    async def end(self) -> None:
        """Let all requests end; then hold the record against what the engine saw."""
        while any(talk.asked for talk in self.talks):
            await self.answer(0)
        segments = self.session.segments
        assert [s.index for s in segments] == list(range(len(segments)))
        assert all(s.parent is None or s.parent < s.index for s in segments)
        by_id, seen = self.by_id(segments), {request.id: request for request in self.engine.requests}
        for id, completion in self.engine.completed:
            reply = by_id[id.partition(".")[0]]
            at = reply.parent
            assert reply.tokens == completion.tokens
            path: list[int] = []
            while at is not None:
                path[:0] = segments[at].tokens
                at = segments[at].parent
            assert tuple(path) == seen[id].tokens, "a branch's ids are those that the engine saw"
        sampled = sum(len(s.tokens) for s in segments if s.model)
        assert sampled == sum(len(completion.tokens) for _, completion in self.engine.completed)
        assert all(conversation(segments, s.index) for s in segments)


def told(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """What a conversation told, replies aside, which come back in other forms."""
    return [(message.role, message.content) for message in messages if message.role != "assistant"]


def called(messages: Sequence[Message]) -> list[str]:
    """The calls in a conversation that parsed, in order."""
    calls = [c for m in messages for c in m.tool_calls if c.arguments is not None and UNREAD not in c.arguments]
    return [f"{c.name} {sorted((k, str(v).removesuffix('.0')) for k, v in c.arguments.items())}" for c in calls]


ACTIONS = ("ask", "answer", "ask", "answer", "agent", "cancel", "edit", *REWRITES)
PROGRAMS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 200)), min_size=6, max_size=30)


def run(program: list[tuple[str, int]]) -> None:
    """Run clients against one session."""

    async def main() -> None:
        world = World()
        for action, choice in program:
            await world.act(action, choice)
        await world.end()

    run_virtual(main())


@settings(max_examples=150, deadline=None)
@given(PROGRAMS)
def test_a_branch_is_the_engines_ids_for_any_client(program):
    run(program)


EQUAL_BUT_FOR_TOOLS = [("agent", 0), ("agent", 0), ("tools", 1), ("ask", 20), ("answer", 0), ("ask", 1)]
"""Two agents say the same, one with its tools in another order: two prompts of equal messages."""


@settings(max_examples=60, deadline=None)
@given(PROGRAMS)
@example(EQUAL_BUT_FOR_TOOLS)
@on_virtual_clock
async def test_the_store_contains_the_whole_tree_for_any_client(program):
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "store.sqlite")
        world = World(store)
        for action, choice in program:
            await world.act(action, choice)
        await world.end()
        await asyncio.sleep(1)  # of the virtual clock: notes that nobody waits for are written
        segments = settled(store.turns("r"))
        store.close()
    held = [replace(s, delivered=False if s.delivered is False else None) for s in world.session.segments]
    stored = [replace(s, delivered=False if s.delivered is False else None) for s in segments]
    assert stored == held, "fork reasons, labels, evidence, told messages, tools; what nobody says is delivered"
    for id, segment in world.by_id(segments).items():
        if id in world.asked:
            talk, messages, tools = world.asked[id]
            before = conversation(segments, segment.parent)
            assert told(before) == told(messages) and called(before) == called(messages)
            assert {tool.name for tool in tools_of(segments, segment.index)} == {tool.name for tool in tools}
            assert (segment.evidence or Evidence()).agent == talk.agent


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(PROGRAMS)
def test_rewrites_of_twenty_thousand_clients(program):
    run(program)
