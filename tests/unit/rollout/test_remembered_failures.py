"""A request that failed is the rollout's failure until the same request is answered, whatever else is answered."""

from __future__ import annotations

import pytest
from fates import FatedBoxes, FatedWorld, make_stack
from virtual import on_event_loop

from sparring.errors import EngineError, LimitReached, SparringError
from sparring.harness.chat import ChatHarness
from sparring.harness.load import CallableHarness
from sparring.protocols import Episode
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.reply import ReplyRequest, whole_reply
from sparring.rollout.config import RolloutConfig
from sparring.rollout.phases import Phases, TurnLimit, Waits
from sparring.rollout.runner import RolloutRunner
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_script, toy_task
from sparring.types import Limits, Message, Outcome

RENDERER = toy_renderer()


def asks(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def sessions(fail_on: tuple[int, ...] = (), **limits: int) -> tuple:
    engine = ScriptedEngine(
        lambda request: reply_tokens(RENDERER, Message(role="assistant", content="A.")), fail_on=fail_on
    )
    session = Recorder(engine, RENDERER).open(toy_task(), rollout_id="r", seed=7, limits=Limits(**limits))
    limit = TurnLimit(Phases(Waits(RolloutConfig())), "policy")
    session.add_layer(limit)
    return session, limit


@on_event_loop
async def test_another_request_that_is_answered_hides_no_failure() -> None:
    session, limit = sessions(fail_on=(1,))
    with pytest.raises(EngineError):
        await whole_reply(session.reply(ReplyRequest(asks("a title?"))))
    await whole_reply(session.reply(ReplyRequest(asks("the work"))))
    assert isinstance(limit.failure, EngineError)
    await whole_reply(session.reply(ReplyRequest(asks("a title?"))))
    assert limit.failure is None


@on_event_loop
async def test_a_limit_is_remembered_and_a_prompt_that_was_too_long_is_not() -> None:
    session, _ = sessions(max_turns=1)
    with pytest.raises(LimitReached):
        await whole_reply(session.reply(ReplyRequest(asks("word " * 400_000))))
    assert session.limit.reason == "context_length"
    await whole_reply(session.reply(ReplyRequest(asks("short"))))
    assert session.limit is None
    for text in ("more", "word " * 400_000):
        with pytest.raises(LimitReached):
            await whole_reply(session.reply(ReplyRequest(asks(text))))
    assert session.limit.reason == "max_turns"


async def complains(episode: Episode) -> None:
    """A client's program: it raises its own error for whatever is no answer, as the vendors' clients do."""
    try:
        await ChatHarness().run(episode)
    except SparringError as error:
        raise RuntimeError("Error code: 400") from error


@pytest.mark.parametrize(
    ("limits", "fail_on", "outcome", "failure"),
    [
        ({"max_turns": 1}, (), Outcome(kind="truncated", reason="max_turns"), None),
        ({}, (2,), None, "EngineError"),
        ({}, (), Outcome(kind="completed", reason="answered"), None),
    ],
)
def test_a_program_that_raises_what_it_was_answered_with_ended_by_that(
    limits: dict[str, int], fail_on: tuple[int, ...], outcome: Outcome | None, failure: str | None
) -> None:
    stack = make_stack(engine=ScriptedEngine(toy_script(toy_renderer()), fail_on=fail_on), rebuilds=0, **limits)
    runner = RolloutRunner(
        FatedWorld(stack.fates), FatedBoxes(stack.fates), stack.recorder, CallableHarness(complains), stack.config
    )
    done = run_virtual(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1))[0]
    ended = done.rollout.outcome
    assert outcome is None or ended == outcome
    assert (ended.failure.error if ended.failure else None) == failure


async def breaks_behind_a_cut_reply(episode: Episode) -> None:
    """A program with a mistake of its own, which has nothing to do with the reply that was cut."""
    await whole_reply(episode.session().reply(ReplyRequest(episode.task.messages)))
    raise KeyError("no such name")


def test_a_mistake_of_the_harness_behind_a_limit_is_told_and_counted() -> None:
    """A limit of the rollout is its outcome, whatever its harness makes of it; but nobody would see the mistake."""
    stack = make_stack(engine=ScriptedEngine(toy_script(toy_renderer())), rebuilds=0, max_tokens=3)
    said: list[str] = []
    harness = CallableHarness(breaks_behind_a_cut_reply)
    runner = RolloutRunner(
        FatedWorld(stack.fates), FatedBoxes(stack.fates), stack.recorder, harness, stack.config, report=said.append
    )
    ended = run_virtual(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1))[0].rollout.outcome
    assert (ended.kind, ended.reason) == ("truncated", "max_tokens")
    assert runner.metrics()["rollout/harness_failed"] == 1
    (sentence,) = said
    assert sentence.startswith("rl/0/0: a limit ended it, and behind that its harness raised: ")
    assert "breaks_behind_a_cut_reply: KeyError: 'no such name'" in sentence
