"""Requests that two updates met are sampled again, alone with each other, to the bit: each token under the version that
sampled it, behind keys and values of the version that computed them."""

import asyncio
from dataclasses import replace

import pytest

from sparring.errors import EngineError
from sparring.generation import Completion, GenerateRequest, Recorded, Runs, Sampling
from sparring.rollout.resample import Resampling, turns_of
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Outcome, Rollout, Segment, Trajectory

RENDERER = toy_renderer()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Room for requests so long that updates meet them."""
    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("model") / "long", tied=True, seed=4, max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def trained(model_path, references):
    return references(model_path)


def requests():
    """Long and short ones, of prompts that take one step or many to read."""
    ways = [{}, {"temperature": 0.0}, {"temperature": 0.4, "top_k": 6}, {"temperature": 0.3, "top_p": 0.9}]
    return [
        GenerateRequest(
            id=str(number),
            tokens=tuple((5 * number + 7 * j) % VOCABULARY for j in range(20 + 90 * (number % 4))),
            sampling=Sampling(max_tokens=(30, 400, 900)[number % 3], seed=number, **ways[number % 4]),
        )
        for number in range(18)
    ]


async def sampled(engine, refs):
    """Sample all requests while two updates come: each after 60 more tokens of one that is watched."""
    watched = GenerateRequest(id="w", tokens=(1, 2, 3), sampling=Sampling(max_tokens=1200, seed=99))
    crowd = [asyncio.create_task(engine.generate(request)) for request in requests()]
    stream, seen, left = engine.stream(watched), 0, list(refs)
    async for piece in stream:
        if not isinstance(piece, Completion):
            seen += len(piece.tokens)
        elif not left:
            completion = piece
        if left and seen > 60 * (1 + len(refs) - len(left)):
            await engine.pull(left.pop(0))
    return [(watched, completion), *zip(requests(), [await task for task in crowd], strict=True)]


def rollout(request, completion):
    """The record of a completion."""
    prompt = Segment(index=0, parent=None, source="template", tokens=request.tokens)
    segment = Segment(
        index=1,
        parent=0,
        source="policy",
        tokens=completion.tokens,
        model="policy",
        logprobs=completion.logprobs,
        versions=completion.versions,
        kv_versions=completion.kv_versions,
        sampling=request.sampling,
        kept=completion.kept,
        finish_reason=completion.finish_reason,
    )
    outcome = Outcome(kind="completed", reason="answered")
    trajectory = Trajectory(id=request.id, task="t", role="solver", segments=(prompt, segment), outcome=outcome)
    task = toy_task(1)
    return Rollout(id=request.id, task=task, index=0, attempt=0, purpose="train", trajectories=(trajectory,))


async def again(engine, refs, turns):
    resampling = Resampling(engine, RENDERER)
    resampling.add(turns)
    for ref in refs:
        await resampling.under(engine.version)
        await engine.pull(ref)
    await resampling.under(engine.version)
    resampling.stop()
    return resampling


SETTINGS = [
    {"live_kv": "keep"},
    {"live_kv": "recompute"},
    {"live_kv": "keep", "kv_tokens": 1600, "max_running": 6},  # requests give way and read again what they had
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_requests_sampled_across_updates_are_replayed_to_the_bit(serve, model_path, trained, settings):
    for _ in range(20):  # a fast machine may have sampled most of them before an update has come
        record = serve(lambda engine: sampled(engine, trained), path=model_path, **settings)
        turns = list(turns_of([rollout(*each) for each in record], "policy"))
        assert len(turns) == 19
        across = [turn for turn in turns if len(turn.recorded.versions.values) > 1]
        read_again = [turn for turn in turns if len(turn.recorded.kv_versions.values) > 1]
        if len(across) > 3 and (read_again or "kv_tokens" not in settings):
            break
    assert len(across) > 3
    assert read_again or "kv_tokens" not in settings, "one read again what it had before an update"
    once_more = serve(lambda engine: again(engine, trained, turns), path=model_path, **settings)
    assert (once_more.difference, once_more.crowded) == (None, 0)
    assert (once_more.turns, once_more.across) == (len(turns), len(across))


def test_a_bit_of_another_version_is_found(serve, model_path, trained):
    record = serve(lambda engine: sampled(engine, trained), path=model_path)
    turns = list(turns_of([rollout(*each) for each in record], "policy"))
    at = next(n for n, turn in enumerate(turns) if len(turn.recorded.versions.values) > 1)
    segment = turns[at].segment
    (first, second, *lengths), values = segment.versions.lengths, segment.versions.values
    moved = Runs(lengths=(first - 1, second + 1, *lengths), values=values)
    turns[at] = replace(turns[at], segment=replace(segment, versions=moved))
    once_more = serve(lambda engine: again(engine, trained, turns), path=model_path)
    difference = once_more.difference
    assert (difference.trajectory, difference.position) == (turns[at].trajectory.id, first - 1)


def test_a_waiting_replay_reports_the_engines_failure(serve, model_path, trained):
    record = serve(lambda engine: sampled(engine, trained), path=model_path)
    turns = [t for t in turns_of([rollout(*each) for each in record], "policy") if len(t.recorded.versions.values) > 1]

    async def closed(engine):
        resampling = Resampling(engine, RENDERER)
        resampling.add(turns)
        await resampling.under(0)
        await engine.close()
        with pytest.raises(EngineError, match="clos"):
            await resampling.under(1)

    serve(closed, path=model_path)


def test_a_prompt_that_an_update_meets_is_read_again(serve, model_path, trained):
    """One version reads all that stands before a token, so that the record says what read it."""

    async def met(engine):
        long = [
            GenerateRequest(id=f"{n}", tokens=tuple(range(n, n + 60)) * 40, sampling=Sampling(max_tokens=4, seed=n))
            for n in range(4)
        ]
        reading = [asyncio.create_task(engine.generate(request)) for request in long]
        for ref in trained:
            await engine.pull(ref)
        return [await task for task in reading]

    completions = serve(met, path=model_path)
    assert any(0 not in completion.versions.values for completion in completions), "an update met a prompt"
    for completion in completions:
        assert completion.kv_versions.values[0] == completion.versions.values[0]


def test_a_request_waits_for_its_version_and_not_for_one_that_has_passed(serve, model_path, trained):
    async def scenario(engine):
        def request(name, version):
            runs = Runs.of(version, 5)
            return replace(requests()[0], id=name, recorded=Recorded(versions=runs, kv_versions=runs))

        late = asyncio.create_task(engine.generate(request("late", 1)))
        beside = await engine.generate(requests()[1])
        assert not late.done()
        await engine.pull(trained[0])
        held = await late
        await engine.pull(trained[1])
        return beside, held, await engine.generate(request("passed", 1))

    beside, held, passed = serve(scenario, path=model_path)
    assert [c.versions.values for c in (beside, held, passed)] == [(0,), (1,), (2,)]


def test_a_waiting_replay_that_is_dropped_frees_its_slot(serve, model_path):
    async def scenario(engine):
        runs = Runs.of(7, 5)
        held = replace(requests()[0], recorded=Recorded(versions=runs, kv_versions=runs))
        waiting = asyncio.create_task(engine.generate(held))
        await engine.generate(requests()[3])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return len((await engine.generate(requests()[4])).tokens), engine.metrics

    tokens, metrics = serve(scenario, path=model_path, max_running=1)
    assert tokens == 400 and metrics["running_now"] == metrics["waiting_now"] == 0


def test_no_versions_are_no_record():
    with pytest.raises(ValueError, match="leave `recorded` out"):
        Recorded(versions=Runs(), kv_versions=Runs())
