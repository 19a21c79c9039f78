"""The engine's answers do not depend on what happens around a request, and nothing that goes wrong leaves a caller waiting."""

import asyncio
from dataclasses import replace

import pytest
import torch

from sparring.engine.native import NativeEngine
from sparring.errors import EngineError
from sparring.model.attention import Packed
from sparring.model.kernels import ops
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY
from sparring.types import GenerateRequest, Runs, Sampling, ScoreRequest

PAIR = ScoreRequest(id="pair", tokens=(1, 2))


def request(number, *, conversation=None, priority=0, tokens=None, **sampling):
    length = 1 + (13 * number) % 50
    return GenerateRequest(
        id=str(number),
        tokens=tokens or tuple((5 * number + 7 * j) % VOCABULARY for j in range(length)),
        sampling=Sampling(**{"max_tokens": 20 + number % 5, "seed": number, "stop": (3,), **sampling}),
        conversation=conversation,
        priority=priority,
    )


def everyone():
    return [request(i, temperature=(1.0, 0.6, 0.0)[i % 3], top_k=(0, 5)[i % 2], top_p=(1.0, 1.0, 1.0, 0.9)[i % 4]) for i in range(32)]


def content(completion):
    return completion.tokens, completion.logprobs, completion.finish_reason


async def together(engine):
    return [content(answer) for answer in await asyncio.gather(*map(engine.generate, everyone()))]


@pytest.fixture(scope="module")
def reference(model_path):
    """Every request by a naive loop: the whole sequence through the training forward for each token."""
    model = load(model_path)
    answers = []
    with torch.inference_mode():
        for item in everyone():
            tokens, logprobs, sampling = list(item.tokens), [], item.sampling
            while True:
                hidden = model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), Packed.of([len(tokens)]))
                token, logprob = ops.sample(
                    model.logits(hidden[-1:]),
                    torch.tensor([sampling.temperature]),
                    torch.tensor([sampling.top_k]),
                    torch.tensor([sampling.top_p]),
                    torch.tensor([sampling.seed], dtype=torch.uint64),
                    torch.tensor([len(tokens)]),
                )
                tokens.append(token.item())
                logprobs.append(logprob.item())
                if tokens[-1] in sampling.stop or len(logprobs) == sampling.max_tokens:
                    break
            reason = "stop" if tokens[-1] in sampling.stop else "length"
            answers.append((tuple(tokens[len(item.tokens) :]), tuple(logprobs), reason))
    return answers


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 2048},
        {"max_running": 7, "max_batch_tokens": 8},
        {"max_running": 1},
        {"share_prefixes": False},
        {"kv_tokens": 192},
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_those_of_full_recomputation(serve, reference, settings):
    assert serve(together, **settings) == reference
    assert {answer[2] for answer in reference} == {"stop", "length"}


def test_preemption_happens_and_does_not_show(serve, reference):
    async def scenario(engine):
        return await together(engine), engine.metrics["preemptions"]

    answers, preemptions = serve(scenario, kv_tokens=192, max_running=8)
    assert answers == reference
    assert preemptions > 0


def test_alone_one_by_one(serve, reference):
    async def scenario(engine):
        return [content(await engine.generate(item)) for item in everyone()[:8]]

    assert serve(scenario) == reference[:8]


def test_more_stops_than_a_call_of_several_steps_knows(serve, reference):
    async def scenario(engine):
        many = [replace(item, sampling=replace(item.sampling, stop=(*range(-12, 0), 3))) for item in everyone()]
        return [content(answer) for answer in await asyncio.gather(*map(engine.generate, many))]

    assert serve(scenario) == reference


def conversation(settings):
    """Three conversations of four turns; each next prompt is the last one, its answer and three new tokens."""

    async def talk(engine, name):
        tokens, answers = tuple((11 * name + j) % VOCABULARY for j in range(9)), []
        for turn in range(4):
            answer = await engine.generate(request(name, tokens=tokens, conversation=str(name), max_tokens=9 + turn))
            answers.append(answer)
            tokens = (*tokens, *answer.tokens, 70 + name, 71, 72)
        return answers

    async def scenario(engine):
        return await asyncio.gather(*(talk(engine, name) for name in range(3)))

    return scenario


def test_kv_across_turns_saves_prefill_and_does_not_show(serve):
    kept, dropped = serve(conversation({})), serve(conversation({}), kv_across_turns="drop", share_prefixes=False)
    assert [[content(a) for a in talk] for talk in kept] == [[content(a) for a in talk] for talk in dropped]
    assert all(a.cached_tokens == 0 for talk in dropped for a in talk)
    for talk in kept:
        length = 9
        for before, after in zip(talk, talk[1:], strict=False):
            assert after.cached_tokens == length + len(before.tokens) - 1
            length += len(before.tokens) + 3


@pytest.mark.parametrize(("length", "found"), [(40, 32), (32, 31), (33, 32), (16, 15), (15, 0)])
def test_a_group_computes_its_prompt_once(serve, length, found):
    prompt = tuple(range(length))

    async def scenario(engine):
        group = [request(i, tokens=prompt, max_tokens=6) for i in range(8)]
        answers = await asyncio.gather(*map(engine.generate, group))
        return [content(a) for a in answers], [a.cached_tokens for a in answers], engine.metrics["prefill_tokens"]

    shared, cached, prefilled = serve(scenario, max_batch_tokens=512)
    alone, none, all_prefilled = serve(scenario, max_batch_tokens=512, share_prefixes=False)
    assert shared == alone
    assert (sorted(cached), none) == ([0] + [found] * 7, [0] * 8)
    assert (prefilled, all_prefilled) == (length + 7 * (length - found), 8 * length)


def test_cancelling_frees_the_request(serve):
    async def scenario(engine):
        tasks = [asyncio.create_task(engine.generate(request(i, max_tokens=150, stop=()))) for i in range(30)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await engine.score(PAIR)
        return results, engine._scheduler.busy, engine._scheduler.cache.pool.num_free == engine._scheduler.cache.pool.num_pages

    results, busy, all_free = serve(scenario)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert not busy and all_free


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"tokens": (1, VOCABULARY)}, "token ids below"),
        ({"tokens": tuple(range(50)) * 6}, "fewer than 256 tokens"),
        ({"tokens": (1,) * 100, "max_tokens": 100}, "within the cache of 128"),
        ({"max_tokens": 0}, "max_tokens of at least 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"min_p": 0.1}, "min_p 0"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(serve, bad, says):
    async def scenario(engine):
        with pytest.raises(EngineError, match=says):
            await engine.generate(request(1, **bad))
        return await engine.generate(request(1))

    assert serve(scenario, kv_tokens=128).tokens


def test_the_last_position_ends_a_request(serve):
    async def scenario(engine):
        return await engine.generate(request(1, tokens=(5,) * 250, max_tokens=99, stop=()))

    answer = serve(scenario)
    assert (len(answer.tokens), answer.finish_reason) == (6, "length")


def test_a_crashed_step_fails_its_requests_and_the_engine_goes_on(serve):
    """One weight of a wrong shape makes every forward raise until it is put right."""

    async def scenario(engine):
        norm = engine._model.module.model.norm
        right = norm.weight
        norm.weight = torch.nn.Parameter(torch.ones(3))
        results = await asyncio.gather(*(engine.generate(request(i)) for i in range(3)), return_exceptions=True)
        norm.weight = right
        return results, content(await engine.generate(request(1))), engine.metrics["failed_steps"]

    async def healthy(engine):
        return content(await engine.generate(request(1)))

    results, after, failed = serve(scenario)
    assert all(isinstance(result, EngineError) for result in results)
    assert failed >= 1
    assert after == serve(healthy)


def test_closing_fails_what_runs_and_refuses_what_comes(serve):
    async def scenario(engine):
        tasks = [asyncio.create_task(engine.generate(request(i, max_tokens=200, stop=()))) for i in range(30)]
        await asyncio.sleep(0)
        await engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for call in (engine.generate(request(1)), engine.score(PAIR)):
            with pytest.raises(EngineError, match="closed"):
                await call
        await engine.close()
        return results

    assert all(isinstance(result, EngineError) for result in serve(scenario))


def test_two_event_loops_can_ask_one_engine(model_path):
    from sparring.engine.config import EngineConfig

    engine = NativeEngine(load(model_path), EngineConfig(), threads=1)
    first = asyncio.run(engine.generate(request(1)))
    second = asyncio.run(engine.generate(request(1)))
    asyncio.run(engine.close())
    assert content(first) == content(second)
    assert first.versions == Runs.of(0, len(first.tokens))
