"""A session of text counts the ids that the policy has which is to imitate it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from conversations import SYSTEM, TOOL, answer, call, say, user
from virtual import on_event_loop

from sparring.errors import BadInput, EngineError, LimitReached, PromptTooLong, RequestRefused
from sparring.generation import Rendered, Sampling
from sparring.record.recorder import Recorder
from sparring.record.token_counts import Imitator
from sparring.record.transcript import TextRecorder, TextRequest, TextSession
from sparring.render.demonstrate import demonstration_tokens, reply_tokens
from sparring.reply import ReplyRequest, whole_reply
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Evidence, Limits, Message, Outcome, ToolSpec

TOOLS = (TOOL,)
LIMITS = Limits(max_turns=300, max_tokens=100_000, max_tool_calls=300)
START = (SYSTEM, user("Which colour has the whale?"))
SETTINGS = [("auto", False), ("auto", True), ("template", False), ("template", True)]


def imitator(renderer: Any, max_context: int = 100_000) -> Imitator:
    reply_ids = partial(reply_tokens, renderer)
    return Imitator(renderer=renderer, reply_ids=reply_ids, max_context=max_context, max_reply=512)


def opened(reply: Any, of: Imitator | None) -> TextSession:
    """The session of an expert that answers with what `reply` returns, or raises it."""

    async def answered(request: TextRequest) -> Message:
        made = reply(request)
        if isinstance(made, Exception):
            raise made
        return made

    recorder = TextRecorder(answered, "expert", of)
    return recorder.open(toy_task(limits=LIMITS), rollout_id="r", seed=7, role="policy")


def edited(number: int) -> list[Message]:
    """A conversation whose client changed its history: it begins a branch."""
    return [*START, say(f"It is number {number}."), user("And now?")]


async def talked(session: Any, turns: int) -> list[tuple[int, int]]:
    """Hold a conversation with tools, then two branches; the ids of each prompt and reply."""
    talk, counted = list(START), []

    async def ask(messages: Sequence[Message]) -> Message:
        reply = await whole_reply(session.reply(ReplyRequest(messages, TOOLS)))
        counted.append((reply.prompt_tokens, len(reply.tokens)))
        return reply.message

    for number in range(turns):
        talk += [await ask(talk), answer(f"book {number}: they are blue")]
    talk += [await ask(talk), user("Sure?")]
    await ask(talk)
    await ask(edited(1))
    await ask([*edited(1), say("Another."), user("Again?")])
    return counted


def script(thinking: bool) -> Any:
    """Calls while tools answer, and else words."""

    def reply(text: str, last: Message) -> Message:
        made = call(f"look {text}") if last.role == "tool" or last == START[-1] else say(f"Blue, {text}.")
        return replace(made, reasoning=f"About {text}.") if thinking else made

    return reply


@pytest.mark.parametrize(("name", "thinking"), SETTINGS)
def test_prompts_are_as_long_as_the_policys(name: str, thinking: bool) -> None:
    """Each turn: the ids that a session of the policy has, and those that sft is shown."""
    renderer, said = toy_renderer(name=name, thinking=thinking, thoughts="kept"), script(thinking)
    texts: list[Message] = []

    def reply(request: TextRequest) -> Message:
        texts.append(said(str(len(texts)), request.messages[-1]))
        return texts[-1]

    session = opened(reply, imitator(renderer))
    counted = asyncio.run(talked(session, 4))
    left = iter(texts)
    engine = ScriptedEngine(lambda request: reply_tokens(renderer, next(left), TOOLS))
    recorder = Recorder(engine, renderer, sampling=Sampling(max_tokens=512), max_context=100_000)
    policy = recorder.open(toy_task(limits=LIMITS), rollout_id="r", seed=7)
    assert counted == asyncio.run(talked(policy, 4))
    for transcript in session.transcripts():
        shown = demonstration_tokens(
            renderer, transcript.messages, transcript.tools, imitated=transcript.imitated, prompt=transcript.prompt
        )
        assert len(shown.tokens) in [prompt + reply for prompt, reply in counted]


@on_event_loop
async def test_a_prompt_that_is_too_long_is_refused_and_not_recorded() -> None:
    """What a client makes of it, a shorter prompt, is answered, and the limit forgotten."""
    renderer = toy_renderer(thoughts="kept")
    session = opened(lambda request: say("Blue."), imitator(renderer, 700))
    long = [*START, say("Blue."), user("whales " * 300)]
    far = [*START, say("Blue."), user("whales " * 3000)]
    await session.complete(START, TOOLS)
    before = session.trajectory(Outcome(kind="completed", reason="answered"))
    for messages, least in ((long, 701), (far, 1400)):
        with pytest.raises(LimitReached, match=r"^r: a prompt of .* tokens, room for 700$") as caught:
            await session.complete(messages, TOOLS)
        assert caught.value.reason == "context_length" and caught.value.too_long is not None
        assert caught.value.too_long[0] >= least and caught.value.too_long[1] == 700
        assert session.limit is caught.value
    assert session.trajectory(Outcome(kind="completed", reason="answered")) == before
    await session.complete([*START, user("Sum it up.")], TOOLS)
    assert session.limit is None
    assert session.count(long, TOOLS) == len(renderer.render(long, TOOLS).tokens)
    assert (session.max_context, session.max_reply) == (700, 512)
    assert session.bytes_of(renderer.stop_ids[0]) == renderer.bytes_of(renderer.stop_ids[0])


def test_a_reply_without_room_is_no_turn() -> None:
    """The policy would be cut short there. Its client makes the prompt shorter, as if that were too long."""
    renderer = toy_renderer(thoughts="kept")
    room = len(renderer.render(START, TOOLS).tokens) + len(reply_tokens(renderer, say("Blue."), TOOLS))
    for most in (room, room - 1):
        session = opened(lambda request: say("Blue."), imitator(renderer, most))
        if most == room:
            assert asyncio.run(session.complete(START, TOOLS)) == say("Blue.")
            continue
        with pytest.raises(
            LimitReached, match=f"^r: a prompt of .* tokens and a reply of .*, room for {most}$"
        ) as caught:
            asyncio.run(session.complete(START, TOOLS))
        assert caught.value.too_long == (room, most) and session.limit is caught.value
        assert session.trajectory(Outcome(kind="completed", reason="answered")).usage.turns == 0
        assert session.transcripts() == ()


@on_event_loop
async def test_the_latest_request_decides_how_a_session_ended() -> None:
    """But no title does, nor one that was refused."""
    limit, refused = LimitReached("max_tokens", "cut short"), BadInput("tools: expected none")
    replies = iter([limit, say("Blue."), limit, say("A title"), refused])
    session = opened(lambda request: next(replies), None)
    ended = []
    for label in (None, None, None, "auxiliary", None):
        with suppress(LimitReached, BadInput):
            await whole_reply(session.reply(ReplyRequest(START, evidence=Evidence(label=label))))
        ended.append(session.limit)
    assert ended == [limit, None, limit, limit, limit]
    assert session.has_turn and session.account.refused == str(refused)


@pytest.mark.parametrize(
    ("error", "counts", "said"),
    [
        (PromptTooLong("teacher: too long", (900, 512)), True, (900, 512)),
        (PromptTooLong("teacher: too long"), True, None),
        (PromptTooLong("teacher: too long"), False, (131073, 131072)),
    ],
    ids=["in numbers", "counted here", "not counted"],
)
def test_a_prompt_that_is_too_long_for_the_server_is_a_limit(
    error: PromptTooLong, counts: bool, said: tuple[int, int] | None
) -> None:
    replies = iter([error, say("Blue.")])
    session = opened(lambda request: next(replies), imitator(toy_renderer()) if counts else None)

    async def main() -> LimitReached:
        with pytest.raises(LimitReached, match="teacher: too long") as caught:
            await session.complete(START, TOOLS)
        assert session.trajectory(Outcome(kind="completed", reason="answered")).usage.turns == 0
        await session.complete(START[1:], TOOLS)
        return caught.value

    limit = asyncio.run(main())
    length = session.count(START, TOOLS)
    assert limit.reason == "context_length" and limit.too_long == (said or (length, length - 1))
    assert session.limit is None


@pytest.mark.parametrize("error", [EngineError("down"), RequestRefused("out of credit")])
@on_event_loop
async def test_a_failure_is_no_turn(error: Exception) -> None:
    replies = iter([error, say("Blue.")])
    session = opened(lambda request: next(replies), None)
    with pytest.raises(type(error)):
        await session.complete(START)
    await session.complete(START)
    assert session.trajectory(Outcome(kind="completed", reason="answered")).usage.turns == 1


def test_repeated_call_ids_of_a_script_become_unique() -> None:
    """Programs know answers by the ids of their calls."""
    double = Message(role="assistant", tool_calls=(*call("a").tool_calls, *call("b").tool_calls))
    session = opened(lambda request: double, None)

    async def main() -> list[str]:
        talk, ids = list(START), []
        for _ in range(2):
            talk += [await session.complete(talk, TOOLS), answer("blue")]
            ids += [each.id for each in talk[-2].tool_calls]
        return ids

    assert asyncio.run(main()) == ["call_0", "call_2_1", "call_4_0", "call_4_1"]


class Counting:
    """A renderer, and the number of messages that it renders for prompts."""

    def __init__(self, renderer: Any) -> None:
        self._renderer, self.messages = renderer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], **settings: bool) -> Rendered:
        self.messages += len(messages)
        return self._renderer.render(messages, tools, **settings)

    def bridge(self, prompt: Any, completion: Any, new: Sequence[Message], tools: Sequence[ToolSpec]) -> Any:
        self.messages += len(new)
        return self._renderer.bridge(prompt, completion, new, tools)


@on_event_loop
async def test_a_late_turn_renders_no_more_than_an_early_one() -> None:
    renderer = Counting(toy_renderer(thoughts="kept"))
    said = script(False)
    session = opened(lambda request: said("it", request.messages[-1]), imitator(renderer))
    rendered = []
    talk = list(START)
    for _ in range(60):
        before = renderer.messages
        talk += [await session.complete(talk, TOOLS), answer("blue")]
        rendered.append(renderer.messages - before)
    assert set(rendered[1:]) == {4}, "what is new, and the reply behind a question"


def test_a_reply_that_the_format_cannot_express_is_counted_as_rendered() -> None:
    """A teacher thinks where the policy does not: its traces are left out later, and the rollout goes on."""
    renderer = toy_renderer(name="template", thinking=False)
    thinks = replace(say("Blue."), reasoning="They swim in it.")
    session = opened(lambda request: thinks, imitator(renderer))

    async def main() -> tuple[Any, Any]:
        first = await whole_reply(session.reply(ReplyRequest(START, TOOLS)))
        return first, await whole_reply(session.reply(ReplyRequest([*START, thinks, user("Sure?")], TOOLS)))

    first, second = asyncio.run(main())
    assert (first.tokens, first.reasoning_tokens) == ((), None)
    assert second.prompt_tokens == len(renderer.render([*START, thinks, user("Sure?")], TOOLS).tokens)
