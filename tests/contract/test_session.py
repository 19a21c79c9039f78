"""What every `Session` promises, over every renderer, on an engine that says odd things."""

from __future__ import annotations

import asyncio
import random

import pytest
from conversations import TOOL, answer, user

from sparring.errors import LimitReached
from sparring.generation import GenerateRequest, Sampling
from sparring.protocols import Session
from sparring.record.recorder import RecordedSession, Recorder
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, Outcome, Trajectory

TOOLS = (TOOL,)
RENDERERS = [
    pytest.param(toy_renderer(name=name, thinking=thinking), id=f"{name}-{'thinking' if thinking else 'direct'}")
    for name in ("qwen3", "template")
    for thinking in (False, True)
]


def noise(request: GenerateRequest) -> list[int]:
    """Random ids, markers more often than others: what an untrained model samples."""
    draw = random.Random(f"{request.sampling.seed}/{len(request.tokens)}")
    return [draw.choice((draw.randrange(400), draw.randrange(370, 400))) for _ in range(draw.randrange(1, 20))]


def open_session(engine: ScriptedEngine, renderer, seed: int) -> RecordedSession:
    """A session with room for a few turns."""
    recorder = Recorder(engine, renderer, sampling=Sampling(max_tokens=64), max_context=100_000)
    limits = Limits(max_turns=6, max_tokens=10_000, max_tool_calls=100)
    return recorder.open(toy_task(limits=limits), rollout_id=f"r{seed}", seed=seed)


async def talk(session: Session, seed: int) -> list[Message]:
    """A conversation that asks again, goes on, edits and compacts, until a limit ends it."""
    draw = random.Random(seed)
    messages = [user("Begin.")]
    try:
        while True:
            reply = await session.complete(messages, TOOLS)
            action = draw.random()
            if action < 0.6:
                messages += [reply, answer(str(seed)) if reply.tool_calls else user("Go on.")]
            elif action < 0.8:
                messages = [*messages, Message(role="assistant", content="Put in your mouth."), user("Really?")]
            elif action < 0.9:
                messages = [user(f"In short: {reply.content[:10]}")]
    except LimitReached:
        return messages


def check(trajectory: Trajectory, requests: list[GenerateRequest]) -> None:
    """Every request is a root-to-leaf path of the record, and sampled segments say what they are."""
    segments = trajectory.segments
    assert [s.index for s in segments] == list(range(len(segments)))
    assert all(s.parent is None or s.parent < s.index for s in segments)
    sampled = [s for s in segments if s.model is not None]
    assert len(sampled) == len(requests) == trajectory.usage.turns
    assert sum(len(s.tokens) for s in sampled) == trajectory.usage.sampled_tokens
    for segment, request in zip(sampled, requests, strict=True):
        path: tuple[int, ...] = ()
        at = segment.parent
        while at is not None:
            path = segments[at].tokens + path
            at = segments[at].parent
        assert path == request.tokens, "the record is what the engine was given"
        assert segment.source == "policy" and segment.sampling == request.sampling
        assert len(segment.logprobs or ()) == len(segment.tokens) == len(segment.versions or ())
    assert all(s.logprobs is None for s in segments if s.model is None)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_whatever_is_said_the_record_is_what_was_sampled(renderer):
    engine = ScriptedEngine(noise)

    async def main() -> None:
        for seed in range(8):
            session = open_session(engine, renderer, seed)
            engine.requests.clear()
            await talk(session, seed)
            check(session.trajectory(Outcome(kind="truncated", reason="max_turns")), engine.requests)
            await session.close()
        assert engine.held == {}

    run_virtual(main())


@pytest.mark.parametrize("renderer", RENDERERS[:1])
def test_fifty_sessions_at_once_record_what_each_would_alone(renderer):
    async def run(together: bool) -> list[Trajectory]:
        engine = ScriptedEngine(noise, latency_s=1.0)
        sessions = [open_session(engine, renderer, seed) for seed in range(50)]
        talks = [talk(session, seed) for seed, session in enumerate(sessions)]
        if together:
            await asyncio.gather(*talks)
            assert engine.most_in_flight == 50
        else:
            for one in talks:
                await one
        return [session.trajectory(Outcome(kind="completed", reason="answered")) for session in sessions]

    at_once, at_once_s = run_virtual(run(True))
    alone, alone_s = run_virtual(run(False))
    assert [t.segments for t in at_once] == [t.segments for t in alone]
    assert at_once_s < alone_s / 20


def test_cancelling_a_request_leaves_no_trace():
    engine = ScriptedEngine(noise, latency_s=10.0)
    session = open_session(engine, toy_renderer(), 0)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await session.complete([user("Hi")])
        assert session.segments == () and session.usage.turns == 0
        await session.complete([user("Hi")])

    run_virtual(main())
    first, second = engine.requests
    assert first.tokens == second.tokens and first.sampling == second.sampling
    assert len(session.segments) == 2
