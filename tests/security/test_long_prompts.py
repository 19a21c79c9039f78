"""A long prompt is rendered beside the event loop that all rollouts share, and the record stands in order all the same."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sparring.errors import BadInput, LimitReached, RequestEnded
from sparring.generation import Constraint, GenerateRequest
from sparring.record.recorder import RecordedSession, Recorder
from sparring.record.rendering import LONG
from sparring.render.demonstrate import reply_tokens
from sparring.reply import ReplyRequest, whole_reply
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, ToolSpec

TOY = toy_renderer()
WORD = "You may call one or more functions to assist with the user query. "
LONG_TEXT = WORD * (LONG // len(WORD) + 1)


class Watched:
    """A renderer that says on which thread each conversation is rendered, and may hold the long ones back.

    Attributes:
        threads: names of the threads, with the characters that they rendered.
        bound: names of the threads that bound requests to ids.
        goes_on: set where long ones may be rendered.
    """

    def __init__(self) -> None:
        self.threads: list[tuple[str, int]] = []
        self.bound: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(TOY, name)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Any:
        characters = sum(len(message.content) for message in messages)
        self.threads.append((threading.current_thread().name.partition("_")[0], characters))
        if characters >= LONG:
            assert self.goes_on.wait(30)
        return TOY.render(messages, tools, generation=generation)

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        self.bound.append(threading.current_thread().name.partition("_")[0])
        assert request.sampling.constraint is None or self.goes_on.wait(30)
        return TOY.bind(request)


def opened(renderer: Any, max_context: int = 32768) -> RecordedSession:
    engine = ScriptedEngine(lambda request: reply_tokens(TOY, Message(role="assistant", content="Done.")))
    limits = Limits(max_turns=20, max_tokens=4000)
    return Recorder(engine, renderer, max_context=max_context).open(
        toy_task(), rollout_id="rl/0/0", seed=7, limits=limits
    )


def user(content: str) -> list[Message]:
    return [Message(role="user", content=content)]


def test_a_long_prompt_is_rendered_beside_the_event_loop_and_a_short_one_on_it() -> None:
    renderer = Watched()
    session = opened(renderer)

    async def main() -> None:
        await whole_reply(session.reply(ReplyRequest(user("Hi"))))
        await whole_reply(session.reply(ReplyRequest(user(LONG_TEXT))))

    asyncio.run(main())
    assert renderer.threads == [("MainThread", 2), ("rendering", len(LONG_TEXT))]


def test_requests_of_a_session_are_planned_in_the_order_in_which_they_came() -> None:
    """The long one comes first and takes longer; the loop goes on meanwhile."""
    renderer = Watched()
    renderer.goes_on.clear()
    session, other = opened(renderer), opened(renderer)

    async def main() -> list[str]:
        asked = [
            asyncio.create_task(whole_reply(session.reply(ReplyRequest(user(text)))))
            for text in (LONG_TEXT, "second", "third")
        ]
        await whole_reply(other.reply(ReplyRequest(user("Another rollout."))))
        assert not any(request.done() for request in asked)
        renderer.goes_on.set()
        return [reply.id for reply in await asyncio.gather(*asked)]

    assert asyncio.run(main()) == ["rl/0/0#1", "rl/0/0#3", "rl/0/0#5"]
    told = [segment.message.content for segment in session.segments if segment.source == "prompt" and segment.message]
    assert told == [LONG_TEXT, "second", "third"]


def test_a_request_that_is_cancelled_while_it_is_rendered_holds_nobody_up() -> None:
    renderer = Watched()
    renderer.goes_on.clear()
    session = opened(renderer)

    async def main() -> str:
        asked = asyncio.create_task(whole_reply(session.reply(ReplyRequest(user(LONG_TEXT)))))
        while not renderer.threads:
            await asyncio.sleep(0)
        asked.cancel()
        reply = await whole_reply(session.reply(ReplyRequest(user("second"))))
        renderer.goes_on.set()
        return reply.id

    assert asyncio.run(main()) == "rl/0/0#1", "the first has no place"


def test_a_prompt_that_is_too_long_by_far_is_never_rendered_whole_nor_counted() -> None:
    renderer = Watched()
    session = opened(renderer, max_context=1000)
    text = WORD * 20_000

    async def main() -> None:
        with pytest.raises(LimitReached, match="a prompt of more than 2000 tokens, room for 1000"):
            await whole_reply(session.reply(ReplyRequest(user(text))))

    asyncio.run(main())
    with pytest.raises(LimitReached, match="a prompt of more than 2000 tokens, room for 1000"):
        session.count(user(text))
    assert max(characters for _, characters in renderer.threads) < len(text) // 10
    assert renderer.threads[0][0] == "rendering"


def schema(number: int, **more: Any) -> Constraint:
    """JSON of an object with so many properties."""
    properties = {f"p{at}": {"type": "array", "items": {"enum": [f"v{at}", at]}} for at in range(number)}
    return Constraint(kind="json_schema", source=json.dumps({"type": "object", "properties": properties, **more}))


def test_a_grammar_is_compiled_beside_the_event_loop_unless_it_is_small_and_known() -> None:
    renderer = Watched()
    session = opened(renderer)
    small, large = schema(1), schema(400)
    assert len(small.source) < LONG < len(large.source)

    async def main() -> None:
        for constraint in (None, small, small, large, large):
            await whole_reply(session.reply(ReplyRequest(user("Hi"), constraint=constraint)))

    asyncio.run(main())
    assert renderer.bound == ["MainThread", "rendering", "MainThread", "rendering", "rendering"]


@pytest.mark.parametrize("number", [1, 400])
def test_others_go_on_while_a_grammar_is_refused(number: int) -> None:
    renderer = Watched()
    renderer.goes_on.clear()
    session, other = opened(renderer), opened(TOY)

    async def main() -> None:
        wrong = schema(number, **{"$ref": "#/nowhere"})
        asked = asyncio.create_task(whole_reply(session.reply(ReplyRequest(user("Hi"), constraint=wrong))))
        await whole_reply(other.reply(ReplyRequest(user("Another rollout."))))
        assert not asked.done()
        renderer.goes_on.set()
        with pytest.raises(BadInput, match="JSON schema: "):
            await asked
        assert (await whole_reply(session.reply(ReplyRequest(user("Hi"))))).id == "rl/0/0#1", (
            "the refused one has no place"
        )

    asyncio.run(main())


def test_a_reply_that_is_ended_while_its_grammar_is_compiled_never_reaches_the_engine() -> None:
    renderer = Watched()
    renderer.goes_on.clear()
    session = opened(renderer)

    async def main() -> None:
        asked = asyncio.create_task(whole_reply(session.reply(ReplyRequest(user("Hi"), constraint=schema(1)))))
        while not renderer.bound:
            await asyncio.sleep(0)
        await session.abort("rl/0/0#1")
        renderer.goes_on.set()
        with pytest.raises(RequestEnded):
            await asked

    asyncio.run(main())
