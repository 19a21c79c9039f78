"""A native engine that sleeps gives its memory back, and goes on with the same bits when it wakes."""

import asyncio
from dataclasses import replace

import pytest
import torch
from common.tiny_adapters import tiny_adapter

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import EngineError, WeightsError
from sparring.generation import GenerateRequest, Sampling, ScoreRequest
from sparring.kernels.memory import discard
from sparring.model.load import load
from sparring.model.peft import read
from sparring.model.staging import held
from sparring.stages.preflight.memory import resident
from sparring.testing.tiny_models import tiny_model
from sparring.weights.inline import publish

PROMPT = tuple(range(40))
LARGE = {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 4096}


def request(number=0, tokens=PROMPT, conversation=None, **settings):
    sampling = Sampling(**{"max_tokens": 8, "seed": number, **settings})
    return GenerateRequest(id=str(number), tokens=tokens, sampling=sampling, conversation=conversation)


def until_it_runs(serve, scenario, **settings):
    """The result of a scenario whose request still ran when it was needed; one that had ended returns None."""
    return next(filter(None, (serve(scenario, **settings) for _ in range(20))))


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "float32")])
def test_what_weights_and_cache_held_goes_back_to_the_system(family, dtype, tmp_path):
    path = tiny_model(family, tmp_path / "large", **LARGE)

    async def main():
        model = load(path, dtype=dtype)
        engine = NativeEngine(model, EngineConfig(), threads=1)
        await engine.generate(request(tokens=tuple(range(3000)), conversation="c"))
        weights, cache = sum(tensor.nbytes for tensor in held(model)), engine.metrics["kv_bytes_now"]
        before = resident()
        await engine.sleep()
        asleep = resident()
        assert engine.metrics["kv_bytes_now"] == 0
        await engine.close()
        return weights + cache, before - asleep

    held_bytes, given_back = asyncio.run(main())
    assert held_bytes > 12 << 20 and given_back >= 0.9 * held_bytes


def test_memory_is_given_back_between_the_ends_of_a_tensor():
    whole = torch.ones(3 << 20)
    inner = whole[1:-1]
    discard([inner, whole.view(3, -1).t()])  # the latter is not contiguous
    assert whole[0] == whole[-1] == 1 and inner.sum() < 4096
    whole.fill_(2)
    assert inner.sum() == 2 * len(inner)


@pytest.mark.parametrize("settings", [{}, {"share_prefixes": False}, {"across_turns": "offload", "idle_bytes": 20_000}])
def test_no_key_of_before_is_read_again(serve, model_path, settings):
    """Neither prefixes, nor parked conversations, nor those in host memory."""
    ref = publish("policy", 0, load(model_path).state())
    first, other = request(1, conversation="c"), request(2, tokens=PROMPT[1:], conversation="d")

    def turns(sleeps):
        async def scenario(engine):
            said = [await engine.generate(one) for one in (first, other)]
            if sleeps:
                await engine.sleep()
                await engine.wake(ref)
            longer = [
                replace(one, tokens=(*one.tokens, *answer.tokens, 9))
                for one, answer in zip((first, other), said, strict=True)
            ]
            return [await engine.generate(one) for one in longer]

        return serve(scenario, **settings)

    slept, awake = turns(True), turns(False)
    assert [replace(one, cached_tokens=0) for one in awake] == slept
    assert any(one.cached_tokens for one in awake)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma2"])
def test_states_and_the_librarys_forward_go_on_too(family, tmp_path):
    path = tiny_model(family, tmp_path / "model", seed=1)

    def turns(sleeps):
        async def main():
            model = load(path, numerics="fast")
            ref = publish("policy", 0, {name: tensor.clone() for name, tensor in model.state().items()})
            engine = NativeEngine(model, EngineConfig(), threads=1)
            first = await engine.generate(request(conversation="c"))
            if sleeps:
                await engine.sleep()
                await engine.wake(ref)
            answer = await engine.generate(request(tokens=(*PROMPT, *first.tokens, 4)))
            await engine.close()
            return answer

        return asyncio.run(main())

    assert turns(True).tokens == turns(False).tokens


def test_a_sleep_refuses_an_update_that_waits(serve, references, tmp_path):
    """The request that the update waits for goes on after the sleep, with the weights that came then."""
    path = tiny_model("qwen3", tmp_path / "long", max_position_embeddings=4096)
    one, two = references(path)

    async def scenario(engine):
        stream = engine.stream(request(1, max_tokens=2000))
        pieces = [await anext(stream)]
        update = asyncio.create_task(engine.pull(one))
        while not engine._worker.scheduler.draining:
            if update.done():
                return None
            await asyncio.sleep(0)
        await engine.sleep()
        with pytest.raises(WeightsError, match="expected an engine that is awake"):
            await update
        assert engine.version == 0
        await engine.wake(two)
        return [*pieces, *[piece async for piece in stream]][-1]

    versions = until_it_runs(serve, scenario, path=path, live_kv="drain").versions
    assert versions.values == (0, 2) and sum(versions.lengths) == 2000


def test_an_engine_that_cannot_wake_stays_asleep(serve, references, model_path):
    one, two = references(model_path)
    wrong = replace(two, probe=((4, 9, 2), (-1.0, -1.0)))

    async def scenario(engine):
        await engine.pull(one)
        expected = await engine.generate(request(1))
        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(request(1)))
        for ref, said in (
            (wrong, "log-probabilities on its probe.*stays asleep"),
            (replace(one, version=0), "expected the version 1 that was served, or one above it"),
            (replace(two, version=1), "expected the version 1 that was served, or one above it"),
            (replace(two, location={}), "stays asleep|checksum"),
        ):
            with pytest.raises(WeightsError, match=said):
                await engine.wake(ref)
            assert engine.version == 1 and not waiting.done()
        await engine.wake(one)
        return expected, await waiting

    expected, answer = serve(scenario)
    assert answer == replace(expected, cached_tokens=answer.cached_tokens)


def test_scores_and_new_requests_wait_too(serve, model_path):
    ref = publish("policy", 3, load(model_path).state())
    judged = ScoreRequest(id="s", tokens=tuple(range(70)), first=3)

    async def scenario(engine):
        expected = await engine.score(judged)
        stream = engine.stream(request(1, max_tokens=200))
        await anext(stream)
        await engine.sleep()
        if not engine.metrics["running_now"] + engine.metrics["waiting_now"]:
            await engine.wake(ref)
            return None
        score = asyncio.create_task(engine.score(judged))
        other = asyncio.create_task(engine.generate(request(2)))
        await engine.check()
        await engine.wake(ref)
        await stream.aclose()
        return expected, await score, await other, await engine.generate(request(2))

    expected, score, other, plain = until_it_runs(serve, scenario)
    assert score == replace(expected, version=3, cached_tokens=score.cached_tokens)
    assert (other.tokens, other.logprobs) == (plain.tokens, plain.logprobs)


def test_an_engine_with_an_adapter_refuses_to_sleep(serve, model_path, tmp_path):
    state = read(tiny_adapter(model_path, tmp_path / "adapter"))

    async def scenario(engine):
        await engine.pull(publish("policy", 1, state, adapter="tone"))
        with pytest.raises(EngineError, match="expected no adapters to sleep, got 1"):
            await engine.sleep()
        await engine.drop("tone")
        await engine.sleep()

    serve(scenario)
