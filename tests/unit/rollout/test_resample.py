"""Replay finds the first differing bit, and only that."""

import asyncio
import math
from dataclasses import replace

import pytest
from fates import make_stack

from sparring.generation import KeptSets
from sparring.rollout.resample import Resampling, prompt_of, resample, turns_of
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_script, toy_task
from sparring.types import Rollout, Segment


def engine(version: int = 0) -> ScriptedEngine:
    """The engine that sampled the record, or another version of it."""
    return ScriptedEngine(toy_script(toy_renderer()), version=version)


def recorded() -> Rollout:
    """A rollout of two turns."""
    return make_stack(engine=engine()).run(toy_task()).rollout


def run(rollout: Rollout, version: int = 0) -> Resampling:
    """The replay on a fresh engine."""
    return asyncio.run(resample(turns_of([rollout], "policy"), engine(version), toy_renderer()))


def changed(rollout: Rollout, turn: int, change) -> Rollout:
    """The record with one policy segment replaced."""
    (trajectory,) = rollout.trajectories
    index = [s.index for s in trajectory.segments if s.model][turn]
    segments = tuple(change(s) if s.index == index else s for s in trajectory.segments)
    return replace(rollout, trajectories=(replace(trajectory, segments=segments),))


def test_a_rollout_comes_back_to_the_bit() -> None:
    rollout = recorded()
    report = run(rollout)
    assert report.identical and report.turns == 2 and report.difference is None
    assert report.tokens == rollout.trajectories[0].usage.sampled_tokens


def test_one_unit_in_the_last_place_is_found() -> None:
    def nudged(segment: Segment) -> Segment:
        logprobs = list(segment.logprobs or ())
        logprobs[1] = math.nextafter(logprobs[1], 0.0)
        return replace(segment, logprobs=tuple(logprobs))

    report = run(changed(recorded(), 1, nudged))
    assert not report.identical and report.turns == 2 and report.difference is not None
    assert (report.difference.what, report.difference.position) == ("logprob", 1)
    assert float.fromhex(report.difference.expected) != float.fromhex(report.difference.got)


def test_another_kept_set_is_found() -> None:
    def limited(segment: Segment) -> Segment:
        return replace(
            segment, kept=KeptSets.of([[token, token + 1] if n == 2 else [] for n, token in enumerate(segment.tokens)])
        )

    report = run(changed(recorded(), 0, limited))
    assert report.difference is not None and (report.difference.what, report.difference.position) == ("kept", 2)
    assert (report.difference.expected, report.difference.got[:6]) == ("2 ids", "0, not")


@pytest.mark.parametrize("what", ["token", "length"])
def test_other_tokens_are_found(what: str) -> None:
    def other(segment: Segment) -> Segment:
        if what == "token":
            return replace(segment, tokens=(segment.tokens[0] + 1, *segment.tokens[1:]))
        short = len(segment.tokens) - 1
        versions = replace(segment.versions, lengths=(short,))
        return replace(segment, tokens=segment.tokens[:-1], logprobs=segment.logprobs[:-1], versions=versions)

    rollout = recorded()
    report = run(changed(rollout, 0, other))
    assert report.difference is not None and report.difference.what == what
    first = next(segment for segment in rollout.trajectories[0].segments if segment.model)
    assert report.difference.segment == first.index, "the first of those that differ"


def test_other_weights_are_not_compared() -> None:
    report = run(recorded(), version=3)
    assert not report.identical and (report.turns, report.num_left, report.difference) == (0, 2, None)


def test_the_prompt_is_what_was_sent() -> None:
    stack = make_stack(engine=engine())
    (trajectory,) = stack.run(toy_task()).rollout.trajectories
    turns = [s for s in trajectory.segments if s.model]
    assert [prompt_of(trajectory, s) for s in turns] == [r.tokens for r in stack.engine.requests]
