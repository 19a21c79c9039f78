"""A conversation that leaves another is stored by the ids behind those that both have, and comes back whole."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import make_rollout

from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.store.codec import StoredRollout, decode, encode
from sparring.store.deltas import with_shared, without_shared
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Fork, Limits, Message, Rollout, Segment


@st.composite
def trees(draw) -> tuple[Segment, ...]:
    """Segments, of which some begin a branch that leaves any segment before, with ids of it or none."""
    segments: list[Segment] = []
    for index in range(draw(st.integers(1, 8))):
        tokens = tuple(draw(st.lists(st.integers(0, 3), max_size=6)))
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        fork = None
        if parent is None and index:
            of = draw(st.none() | st.integers(0, index - 1))
            fork = Fork(reason="edited", of=of)
            path, at = (), of
            while at is not None:
                path, at = segments[at].tokens + path, segments[at].parent
            tokens = path[: draw(st.integers(0, len(path)))] + tokens
        segments.append(Segment(index=index, parent=parent, source="harness", tokens=tokens, fork=fork))
    return tuple(segments)


@settings(max_examples=300, deadline=None)
@given(segments=trees())
def test_every_tree_comes_back_whole(segments: tuple[Segment, ...]) -> None:
    stored, shared = without_shared(segments)
    assert with_shared(stored, shared) == segments
    kept, at = sum(len(s.tokens) for s in stored), {i: s.count for i, s in shared.items()}
    assert kept + sum(at.values()) == sum(len(s.tokens) for s in segments)


def rewritten(turns: int) -> Rollout:
    """A rollout of a client that writes what the policy said in words of its own before each request."""
    renderer = toy_renderer()
    reply = reply_tokens(renderer, Message(role="assistant", content="The answer is 46."))
    engine = ScriptedEngine(lambda request: reply)
    limits = Limits(max_turns=turns, max_tokens=10**6, max_tool_calls=1)

    async def main() -> tuple[Segment, ...]:
        session = Recorder(engine, renderer).open(toy_task(), rollout_id="rl/0/0", seed=7, limits=limits)
        messages = [Message(role="system", content="You add numbers. " * 40), Message(role="user", content="0 + 1?")]
        for turn in range(turns):
            await session.complete(messages)
            messages.append(Message(role="assistant", content=f"I say {turn}."))
            messages.append(Message(role="user", content="Add one. " * 10))
        return session.segments

    return make_rollout(toy_task(), "rl/0/0", asyncio.run(main()))


def stored_bytes(rollout: Rollout) -> int:
    """Bytes of a rollout in the store, which it is read from again."""
    data = encode(StoredRollout.of(rollout, rollout.task))
    assert decode(data, StoredRollout).rollout(rollout.task) == rollout
    return len(data)


def test_a_rewritten_history_takes_linear_space() -> None:
    few, many = rewritten(8), rewritten(32)
    roots = [segment for segment in many.trajectories[0].segments if segment.parent is None]
    assert len(roots) == 32, "each request is rendered whole"
    assert stored_bytes(many) < 4.2 * stored_bytes(few)
    whole = encode(many)
    assert stored_bytes(many) < 0.4 * len(whole)
