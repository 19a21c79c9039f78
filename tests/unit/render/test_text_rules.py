"""What a request says in text is said in ids, for one reply and the ones behind it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import BadInput, EngineError
from sparring.generation import Constraint, GenerateRequest, Sampling
from sparring.model.load import load
from sparring.record.recorder import Recorder
from sparring.rollout.resample import resample, turns_of
from sparring.store.codec import decode, encode
from sparring.testing.tiny_models import tiny_model
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Message, Outcome, Rollout

DIGITS = Constraint(kind="regex", source="[0-9]{1,3}")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3", tmp_path_factory.mktemp("model") / "tiny", seed=2, vocab_size=416)


def told(path: Path, sampling: Sampling, constraints: tuple[Constraint | None, ...]) -> Any:
    """A conversation with one reply for each constraint, which its record says again to the bit: its segments and the
    replies."""

    async def main() -> Any:
        engine = NativeEngine(load(path), EngineConfig(), threads=1)
        recorder = Recorder(engine, toy_renderer(), sampling=sampling, max_context=500)
        session = recorder.open(toy_task(0), rollout_id="r", seed=5)
        messages = [Message(role="user", content="Say something.")]
        try:
            for constraint in constraints:
                reply = await session.complete(messages, constraint=constraint)
                messages += [reply, Message(role="user", content="More.")]
        finally:
            await engine.close()
        trajectory = session.trajectory(Outcome(kind="completed", reason="answered"))
        rollout = Rollout(id="r", task=toy_task(0), index=0, attempt=0, purpose="train", trajectories=(trajectory,))
        again = NativeEngine(load(path), EngineConfig(), threads=1)
        try:
            turns = turns_of([decode(encode(rollout), Rollout)], "policy")
            report = await resample(turns, again, toy_renderer())
        finally:
            await again.close()
        assert report.identical, report.difference
        return session.segments, [message for message in messages if message.role == "assistant"]

    return asyncio.run(main())


def test_a_conversation_continues_after_a_stop_string(path: Path) -> None:
    segments, replies = told(path, Sampling(stop_strings=("e", "1"), max_tokens=200), (None, None, None))
    turns = [segment for segment in segments if segment.model]
    assert [segment.parent for segment in segments] == [None, 0, 1, 2, 3, 4], "one branch: nothing was encoded again"
    for turn, reply in zip(turns, replies, strict=True):
        text = toy_renderer().decode(turn.tokens)
        before = toy_renderer().decode(turn.tokens[:-1])
        assert ("e" in text or "1" in text) and "e" not in before and "1" not in before
        assert reply.content.strip() == text.strip(), "the string is part of the reply, and of what is trained"
    closed = toy_renderer().decode(segments[2].tokens)
    assert closed.startswith("<|im_end|>"), "the turn's end, which was not sampled, belongs to what is told next"


def test_a_constraint_holds_for_the_one_reply(path: Path) -> None:
    words = Constraint(kind="regex", source="[a-z]{2,4}")
    sampling = Sampling(constraint=words, min_tokens=0, max_tokens=60)
    segments, replies = told(path, sampling, (None, DIGITS, None))
    assert [turn.sampling.constraint for turn in segments if turn.model] == [words, DIGITS, words]
    patterns = (words.source, DIGITS.source, words.source)
    assert all(re.fullmatch(pattern, reply.content) for pattern, reply in zip(patterns, replies, strict=True))


def test_a_per_reply_constraint_overrides_min_tokens(path: Path) -> None:
    segments, _ = told(path, Sampling(min_tokens=20, max_tokens=60), (DIGITS,))
    assert segments[1].sampling.min_tokens == 0 and len(segments[1].tokens) < 10


def test_requests_with_invalid_text_rules_are_refused(path: Path) -> None:
    with pytest.raises(BadInput, match="regex: expected one that compiles"):
        told(path, Sampling(), (Constraint(kind="regex", source="("),))


@pytest.mark.parametrize("text", [{"stop_strings": ("a",)}, {"constraint": DIGITS}])
def test_unbound_stop_strings_and_constraints_are_refused(path: Path, text: dict[str, Any]) -> None:
    async def main() -> None:
        engine = NativeEngine(load(path), EngineConfig(), threads=1)
        try:
            await engine.generate(GenerateRequest(id="unbound", tokens=(1,), sampling=Sampling(**text)))
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="unbound: expected the functions `ends` and `allowed` for"):
        asyncio.run(main())
