"""Nouns survive the codec, floats to the bit."""

import math
import struct
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import ANSWERED, LOST, make_rollout
from segments import sampled

from sparring.generation import Constraint, KeptSets, Runs, Sampling
from sparring.store.codec import StoredGroup, StoredRollout, decode, encode
from sparring.types import (
    BoxSpec,
    Failure,
    Group,
    Limits,
    Message,
    Outcome,
    Rollout,
    Score,
    Segment,
    Task,
    Timing,
    ToolCall,
    Usage,
)

NUMBERS = st.floats(allow_nan=False)
COUNTS = st.integers(0, 2**63)
SEEDS = st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXTS | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(TEXTS, PLAIN, max_size=3)
KEPT = st.lists(st.integers(0, 2**31 - 1), max_size=3)
CALLS = st.builds(ToolCall, id=TEXTS, name=TEXTS, arguments=st.none() | TABLES, raw=TEXTS)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXTS,
    reasoning=st.none() | TEXTS,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
)
SECONDS = st.floats(0.001, 1e6)
TASKS = st.builds(
    Task,
    id=TEXTS,
    env=TEXTS,
    messages=st.lists(MESSAGES, max_size=2).map(tuple),
    data=TABLES,
    limits=st.builds(Limits, max_turns=st.integers(1, 2**63), timeout_s=SECONDS),
    box=st.none() | st.builds(BoxSpec, timeout_s=SECONDS, network=st.booleans()),
    seed=SEEDS,
)
SCORES = st.builds(
    Score,
    reward=NUMBERS,
    parts=st.dictionaries(TEXTS, NUMBERS, max_size=2),
    success=st.none() | st.booleans(),
    per_turn=st.none() | st.lists(NUMBERS, max_size=2).map(tuple),
    states=st.none() | st.lists(st.none() | TEXTS, max_size=2).map(tuple),
    per_role=st.none() | st.dictionaries(TEXTS, NUMBERS, max_size=2),
)
TRAINABLE = st.sampled_from(
    [
        ANSWERED,
        Outcome(kind="truncated", reason="timeout"),
        Outcome(kind="policy_failed", reason="failure", failure=Failure(error="EnvError", where="env", message="x")),
    ]
)


@st.composite
def segments(draw, index: int = 0) -> Segment:
    """One segment, sampled or not."""
    tokens = tuple(draw(st.lists(st.integers(0, 2**31), max_size=4)))
    parent = None if index == 0 else index - 1
    if draw(st.booleans()):
        return Segment(index=index, parent=parent, source="prompt", tokens=tokens, message=draw(st.none() | MESSAGES))
    logprobs = tuple(draw(st.lists(NUMBERS, min_size=len(tokens), max_size=len(tokens))))
    runs = Runs.of(draw(COUNTS), len(tokens))
    constraint = st.none() | st.builds(Constraint, kind=st.sampled_from(("json_schema", "regex", "lark")), source=TEXTS)
    asked = {
        "stop_strings": st.tuples(TEXTS),
        "constraint": constraint,
        "logit_bias": st.tuples(st.tuples(st.just(3), NUMBERS)),
    }
    sampling = draw(st.none() | st.builds(Sampling, temperature=NUMBERS, seed=SEEDS, stop=st.just((1, 2)), **asked))
    kept = draw(st.none() | st.lists(KEPT, min_size=len(tokens), max_size=len(tokens)).map(KeptSets.of))
    more = {"versions": runs, "kv_versions": runs, "sampling": sampling, "kept": kept}
    return sampled(index, parent, tokens, logprobs=logprobs, **more)


@st.composite
def rollouts(draw, task: Task, number: int, outcomes=TRAINABLE) -> Rollout:
    """A rollout with one trajectory."""
    return make_rollout(
        task,
        f"rl/0/{number}",
        [draw(segments(i)) for i in range(draw(st.integers(0, 3)))],
        index=number,
        attempt=draw(COUNTS),
        outcome=draw(outcomes),
        usage=Usage(sampled_tokens=draw(COUNTS)),
        timing=Timing(wall_s=draw(NUMBERS)),
        origin=draw(st.none() | st.just(("rl/0/9", 3))),
    )


@st.composite
def groups(draw) -> Group:
    """A group with rollouts and failed ones, one of them of another task."""
    task, other = draw(TASKS), draw(TASKS)
    count = draw(st.integers(0, 3))
    return Group(
        id="rl/0",
        index=draw(st.integers(0, 2**40)),
        task=task,
        rollouts=tuple(draw(rollouts(task if n else other, n)) for n in range(count)),
        scores=tuple(draw(SCORES) for _ in range(count)),
        failed=tuple(draw(rollouts(task, count, st.just(LOST))) for _ in range(draw(st.integers(0, 1)))),
        version=draw(COUNTS),
        baselines=tuple(draw(st.lists(SCORES, max_size=1))),
    )


@settings(max_examples=60, deadline=None)
@given(group=groups())
def test_a_group_comes_back_whole(group: Group) -> None:
    stored = decode(encode(StoredGroup.of(group)), StoredGroup)
    parts = [
        [decode(encode(StoredRollout.of(r, group.task)), StoredRollout).rollout(stored.task) for r in part]
        for part in (group.rollouts, group.failed)
    ]
    assert stored.group(*parts) == group


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_floats_come_back_to_the_bit(bits: list[int]) -> None:
    floats = tuple(struct.unpack("<d", struct.pack("<Q", b))[0] for b in bits)
    again = decode(encode(sampled(0, None, (5,) * len(floats), logprobs=floats)), Segment)
    assert [struct.pack("<d", x) for x in again.logprobs or ()] == [struct.pack("<d", x) for x in floats]


def test_none_is_not_zero() -> None:
    unscored, zero = Score(reward=None), Score(reward=0.0)
    assert decode(encode(unscored), Score).reward is None
    assert decode(encode(zero), Score).reward == 0.0
    assert math.copysign(1, decode(encode(Score(reward=-0.0)), Score).reward) == -1


def test_integers_of_any_size() -> None:
    data = {"n": [2**64, -(2**63) - 1, 10**80, 2**64 - 1], "b": b"x"}
    task = Task(id="big", env="e", messages=(), data=data)
    assert decode(encode(task), Task) == task


def test_other_than_plain_data_is_refused() -> None:
    with pytest.raises(TypeError):
        encode({"x": object()})


def test_wrong_bytes_are_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(encode(Score(reward=1.0)), Task)


FIRST_DECODING = """
import sys, threading
from sparring.store.codec import decode, encode
from sparring.types import Batch, Sample

row = Sample(
    id="a", group="g", source="policy", tokens=(1, 2), weights={"policy": (0.0, 1.0)}, advantages=(0.0, 1.0),
    logprobs=(0.0, -1.0), versions=(-1, 0), kv_versions=(-1, 0),
)
data = encode(Batch(step=1, model="policy", rows=(row,) * 50, denominators={"policy": 1.0}))
ready, found = threading.Barrier(8), []
sys.setswitchinterval(1e-6)


def read():
    ready.wait()
    found.append(decode(data, Batch).step)


threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [1] * 8
"""


def test_threads_that_decode_a_class_for_the_first_time_do_not_crash() -> None:
    """Each try is a process, because the first time is over after one; without a lock one in four crashed."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", FIRST_DECODING], check=True)
