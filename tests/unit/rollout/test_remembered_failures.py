"""A request that failed is the rollout's failure until the same request is answered, whatever else is answered."""

from __future__ import annotations

import asyncio

import pytest

from sparring.errors import EngineError, LimitReached
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.rollout.config import RolloutConfig
from sparring.rollout.phases import LimitedSession, Phases, Waits
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message

RENDERER = toy_renderer()


def asks(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def sessions(fail_on: tuple[int, ...] = (), **limits: int) -> tuple:
    engine = ScriptedEngine(
        lambda request: reply_tokens(RENDERER, Message(role="assistant", content="A.")), fail_on=fail_on
    )
    session = Recorder(engine, RENDERER).open(toy_task(), rollout_id="r", seed=7, limits=Limits(**limits))
    return session, LimitedSession(session, Phases(Waits(RolloutConfig())), "policy")


def test_another_request_that_is_answered_hides_no_failure() -> None:
    async def main() -> None:
        _, session = sessions(fail_on=(1,))
        with pytest.raises(EngineError):
            await session.reply(asks("a title?"))
        await session.reply(asks("the work"))
        assert isinstance(session.failure, EngineError)
        await session.reply(asks("a title?"))
        assert session.failure is None

    asyncio.run(main())


def test_a_limit_is_remembered_and_a_prompt_that_was_too_long_is_not() -> None:
    async def main() -> None:
        recorded, session = sessions(max_turns=1)
        with pytest.raises(LimitReached):
            await session.reply(asks("word " * 400_000))
        assert recorded.limit.reason == "context_length"
        await session.reply(asks("short"))
        assert recorded.limit is None
        for text in ("more", "word " * 400_000):
            with pytest.raises(LimitReached):
                await session.reply(asks(text))
        assert recorded.limit.reason == "max_turns"

    asyncio.run(main())
