"""Weight updates of the real vLLM: verified before they serve, rolled back where they are not what was published."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from served import PROMPT, turn

from sparring.errors import EngineError, WeightsError
from sparring.generation import Completion, ScoreRequest
from sparring.types import WeightRef

pytestmark = pytest.mark.vllm


def scores(engine):
    return engine.score(ScoreRequest(id="s", tokens=tuple(range(3, 40))))


def worse(ref: WeightRef) -> WeightRef:
    """The same with a probe that its weights do not give."""
    tokens, logprobs = ref.probe
    return replace(ref, probe=(tokens, tuple(value - 0.5 for value in logprobs)))


async def running(engine, **sampling):
    """A request of three thousand tokens of which the first has come, and what is left of its stream."""
    stream = engine.stream(turn("long", max_tokens=3000, **sampling))
    await anext(stream)
    return asyncio.create_task(_rest(stream))


async def _rest(stream) -> Completion:
    return [piece async for piece in stream][-1]


def test_an_update_serves_what_was_published(run, weights):
    async def scenario(engine):
        before = await scores(engine)
        await engine.pull(weights[1].at(5))
        await engine.weights.verify(weights[1].ref.probe, "again")
        with pytest.raises(WeightsError, match="difference of"):
            await engine.weights.verify(weights[0].ref.probe, "the old ones")
        answer = await engine.generate(turn(tokens=(*PROMPT, *range(60))))
        await engine.pull(weights[1].at(5))  # whoever asks again is acknowledged again
        return before, await scores(engine), answer, engine.version

    before, after, answer, version = run(scenario)
    assert version == 5 and set(answer.versions.expand()) == set(answer.kv_versions.expand()) == {5}
    assert max(abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True)) > 0.5


def test_vllms_own_reload_leaves_the_old_head_and_verification_sees_it(run, weights):
    """The trap: the head is the embedding, and on a CPU vLLM computes with a packed copy of the old one, in silence."""

    async def scenario(engine):
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights[1].path)}}
        await asyncio.to_thread(engine.server.ask, "POST", "/collective_rpc", reload)
        with pytest.raises(
            WeightsError,
            match="expected the publisher's log-probabilities on its probe",
        ):
            await engine.weights.verify(weights[1].ref.probe, "after vLLM's own reload")
        await engine.pull(weights[1].at(5))  # ours repacks the head
        await engine.weights.verify(weights[1].ref.probe, "after ours")

    run(scenario)


@pytest.mark.parametrize("break_it", ["probe", "checksum", "tensor"])
def test_a_failed_update_leaves_the_old_weights(run, weights, break_it):
    def broken():
        ref = weights[1].at(5)
        if break_it == "probe":
            return worse(ref)
        if break_it == "checksum":
            return replace(ref, checksum="0" * 32)
        from sparring.weights.inline import publish

        state = {name: tensor[:-1] if "down_proj" in name else tensor for name, tensor in ref.location.items()}
        return publish("policy", 5, state, ref.probe)

    async def scenario(engine):
        before = await scores(engine)
        with pytest.raises(WeightsError):
            await engine.pull(broken())
        return before, await scores(engine), engine.version, await engine.generate(turn())

    before, after, version, answer = run(scenario)
    assert version == 4 and set(answer.versions.expand()) == {4}
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


def test_nobody_is_served_with_weights_that_were_not_verified(run, weights):
    """A request is under way while an update fails: all its tokens are of the old weights, also by their
    log-probabilities."""

    async def scenario(engine):
        task = await running(engine)
        with pytest.raises(WeightsError):
            await engine.pull(worse(weights[1].at(5)))
        await engine.abort("long")
        answer = await task
        judged = await engine.score(ScoreRequest(id="j", tokens=(*PROMPT, *answer.tokens), first=len(PROMPT)))
        return answer, judged

    answer, judged = run(scenario)
    assert set(answer.versions.expand()) == {4} and answer.tokens
    assert judged.logprobs == pytest.approx(answer.logprobs, abs=1e-4)


@pytest.mark.parametrize(("policy", "oldest"), [("keep", [4, 4]), ("recompute", [4, 5])])
def test_a_running_request_goes_on_under_the_new_weights(run, weights, policy, oldest):
    async def scenario(engine):
        task = await running(engine)
        await engine.pull(weights[1].at(5))
        fresh = await engine.generate(turn("fresh", tokens=(*PROMPT, *range(60))))
        await engine.abort("long")
        return await task, fresh

    answer, fresh = run(scenario, live_kv=policy)
    versions, kv_versions = answer.versions.expand(), answer.kv_versions.expand()
    assert answer.versions.values == (4, 5)
    assert [kv_versions[0], kv_versions[-1]] == oldest and len(kv_versions) == len(versions)
    assert set(fresh.kv_versions.expand()) == {5}


def test_recomputed_keys_are_the_new_weights(run, weights):
    """After an update with `recompute`, what a running request then samples is judged the same as from scratch."""

    async def scenario(engine):
        task = await running(engine)
        await engine.pull(weights[1].at(5))
        await engine.generate(turn("some", max_tokens=100))
        await engine.abort("long")
        answer = await task
        judged = await engine.score(ScoreRequest(id="j", tokens=(*PROMPT, *answer.tokens), first=len(PROMPT)))
        return answer, judged

    answer, judged = run(scenario, live_kv="recompute")
    new = answer.versions.lengths[0]
    assert len(answer.tokens) > new
    assert answer.logprobs[new:] == pytest.approx(judged.logprobs[new:], abs=1e-4)


def test_draining_waits_and_a_late_update_is_refused(run, weights):
    async def scenario(engine):
        task = await running(engine)
        with pytest.raises(
            WeightsError,
            match="not applied within engine.update.timeout_s = 2.0; the engine keeps serving the old version",
        ):
            await engine.pull(weights[1].at(5))
        assert not task.done() and engine.version == 4
        await engine.abort("long")
        await task
        short = asyncio.create_task(engine.generate(turn("short", max_tokens=3)))
        await asyncio.sleep(0)
        await engine.pull(weights[1].at(6))
        return await short, engine.version

    short, version = run(scenario, live_kv="drain", update_timeout_s=2.0)
    assert version == 6 and len(short.versions.values) == 1


def test_a_request_that_waits_for_an_update_can_be_aborted(run, weights):
    async def scenario(engine):
        update = asyncio.create_task(engine.pull(weights[1].at(5)))
        while engine.weights.available.is_set():
            await asyncio.sleep(0)
        waiting = asyncio.create_task(engine.generate(turn("late")))
        stream = asyncio.create_task(_rest(engine.stream(turn("late"))))
        await asyncio.sleep(0)
        await engine.abort("late")
        await update
        return await asyncio.gather(waiting, stream)

    for answer in run(scenario):
        assert (answer.tokens, answer.finish_reason) == ((), "abort")


def test_updates_of_another_model_are_refused(run, weights):
    async def scenario(engine):
        with pytest.raises(WeightsError, match="expected model 'policy'"):
            await engine.pull(weights[1].at(5, model="critic"))
        await engine.close()
        with pytest.raises(EngineError, match="running engine"):
            await engine.pull(weights[1].at(5))

    run(scenario)
