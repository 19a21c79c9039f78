"""Scores are the bits of the trainer's forward, whatever is computed beside them and whatever the cache holds
already."""

import asyncio
from dataclasses import replace

import pytest
import torch
from suite import short_of

from sparring.errors import EngineError
from sparring.generation import GenerateRequest, Sampling, ScoreRequest
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]


@pytest.fixture(scope="module", params=[("qwen3", "float32"), ("llama", "bfloat16"), ("phi3", "float32")], ids="-".join)
def model(request, tmp_path_factory):
    """(folder, dtype); Phi-3 is served operation by operation."""
    family, dtype = request.param
    return tiny_model(family, tmp_path_factory.mktemp("model") / family, seed=4), dtype


def item(number, length=None, first=None, **settings):
    length = length or 2 + (29 * number) % 120
    tokens = tuple((5 * number + 7 * j + j * j) % VOCABULARY for j in range(length))
    first = first or 1 + (number * number) % (length - 1)
    settings = {"temperature": (1.0, 0.7, 0.0)[number % 3], "top_k": (0, 3, 7)[number % 3], **settings}
    return ScoreRequest(id=f"s{number}", tokens=tokens, first=first, **settings)


def sample(number, tokens=None, **settings):
    sampling = Sampling(**{"max_tokens": 40, "seed": number, **settings})
    return GenerateRequest(id=str(number), tokens=tokens or tuple(range(number % 30 + 1)), sampling=sampling)


def trained(path, dtype, requests):
    """(log-probabilities, entropies) by one packed forward with gradients on."""
    model = load(path, dtype=dtype)
    lengths = [len(request.tokens) - 1 for request in requests]
    tokens = torch.tensor([token for request in requests for token in request.tokens[:-1]])
    hidden = model.hidden(tokens, torch.cat([torch.arange(length) for length in lengths]), Packed.of(lengths))
    targets = torch.tensor([token for request in requests for token in request.tokens[1:]])
    heat = torch.cat([torch.full((n,), request.temperature) for n, request in zip(lengths, requests, strict=True)])
    found = token_quantities(model, hidden, targets, heat, {"logprob", "entropy"})
    parts = zip(*(found[name].detach().split(lengths) for name in ("logprob", "entropy")), strict=True)
    return [
        tuple(tuple(part[request.first - 1 :].tolist()) for part in both)
        for both, request in zip(parts, requests, strict=True)
    ]


def numbers(scores):
    return scores.logprobs, scores.entropies


@pytest.mark.parametrize(
    "settings",
    short_of(
        [
            {"max_tokens": 2048},
            {"max_running": 3, "max_tokens": 5},
            {"share_prefixes": False},
            {"kv_tokens": 192, "max_running": 8},
        ],
        [{"max_running": 3, "max_tokens": 5}],
    ),
    ids=str,
)
def test_scores_equal_the_training_forward_beside_generation(serve, model, settings):
    path, dtype = model
    judged = [item(number) for number in range(14)]

    async def scenario(engine):
        answers = [asyncio.create_task(engine.generate(sample(number))) for number in range(10)]
        scores = await asyncio.gather(*map(engine.score, judged))
        again = await asyncio.gather(*map(engine.score, judged))
        answers = [(a.tokens, a.logprobs) for a in await asyncio.gather(*answers)]
        await engine.generate(sample(0, max_tokens=1))
        return scores, again, answers, engine.metrics

    async def alone(engine):
        return [
            (a.tokens, a.logprobs)
            for a in await asyncio.gather(*(engine.generate(sample(number)) for number in range(10)))
        ]

    scores, again, answers, metrics = serve(scenario, path=path, dtype=dtype, **settings)
    expected = trained(path, dtype, judged)
    assert list(map(numbers, scores)) == list(map(numbers, again)) == expected
    assert answers == serve(alone, path=path, dtype=dtype, **settings)
    assert metrics["kv_bytes_now"] == 0
    assert metrics["scored_tokens"] >= sum(len(j.tokens) - 1 for j in judged)
    assert metrics["prefill_tokens"] < sum(len(sample(number).tokens) + 60 for number in range(10))


def test_the_likeliest_tokens_are_those_of_the_whole_distribution(serve, model):
    path, dtype = model
    request = item(5, length=60, first=30, temperature=0.7, top_k=9)

    async def scenario(engine):
        full, few = await engine.score(replace(request, top_k=VOCABULARY)), await engine.score(request)
        each = [
            await engine.score(replace(request, tokens=(*request.tokens[:30], token))) for token in range(VOCABULARY)
        ]
        return full, few, [scores.logprobs[0] for scores in each]

    full, few, each = serve(scenario, path=path, dtype=dtype)
    assert few.top_ids == tuple(ids[:9] for ids in full.top_ids) and few.top_logprobs == tuple(
        tops[:9] for tops in full.top_logprobs
    )
    best = sorted(range(VOCABULARY), key=lambda token: (-each[token], token))
    assert full.top_logprobs[0] == tuple(each[token] for token in full.top_ids[0])
    assert sorted(full.top_ids[0]) == list(range(VOCABULARY))
    assert [each[token] for token in best] == list(full.top_logprobs[0])
    assert few.logprobs == full.logprobs and few.entropies == full.entropies


@pytest.mark.parametrize(
    ("first", "found"),
    short_of([(1, 0), (16, 15), (17, 16), (33, 32), (60, 48), (65, 64), (79, 64)], [(1, 0), (17, 16), (79, 64)]),
)
def test_cached_tokens_before_the_scored_ones_are_skipped(serve, model, first, found):
    path, dtype = model
    request = item(1, length=80, first=first)

    async def scenario(engine):
        await engine.generate(sample(9, tokens=request.tokens[:66], max_tokens=1))
        before = engine.metrics["scored_tokens"]
        scores = await engine.score(request)
        return scores, engine.metrics["scored_tokens"] - before

    scores, computed = serve(scenario, path=path, dtype=dtype)
    assert (scores.cached_tokens, computed) == (found, 79 - found)
    assert [numbers(scores)] == trained(path, dtype, [request])


def test_a_prompt_that_was_scored_is_not_read_again(serve, model):
    path, dtype = model
    tokens = item(1, length=81).tokens

    async def scenario(engine):
        await engine.score(ScoreRequest(id="s", tokens=tokens, first=40))
        return (await engine.generate(sample(1, tokens=tokens))).cached_tokens

    assert serve(scenario, path=path, dtype=dtype) == 80


def test_scores_on_the_way_at_an_update_are_all_of_the_new_weights(serve, model):
    path, dtype = model
    changed = load(path, dtype=dtype)
    with torch.no_grad():
        for name, parameter in changed.state().items():
            parameter.mul_(1.3 if "mlp" in name else 1.0)
    request = item(4, length=200, first=1)

    async def scenario(engine):
        crowd = [asyncio.create_task(engine.generate(sample(number, max_tokens=150))) for number in range(8)]
        scoring = [asyncio.create_task(engine.score(request)) for _ in range(20)]
        _done, waiting = await asyncio.wait(scoring, return_when=asyncio.FIRST_COMPLETED)
        await engine.pull(publish("policy", 1, changed.state()))
        after = await engine.score(request)
        scores = await asyncio.gather(*scoring)
        await asyncio.gather(*crowd)
        return scores, after, len(waiting)

    # eight tokens a step, most of them for who generates: a score takes many steps
    scores, after, waiting = serve(scenario, path=path, dtype=dtype, max_tokens=32, share_prefixes=False)
    [before] = {numbers(score) for score in scores if score.version == 0}
    assert {numbers(score) for score in scores if score.version == 1} <= {numbers(after)} and after.version == 1
    assert [before] == trained(path, dtype, [request]) and before != numbers(after)
    assert waiting == 0 or any(score.version == 1 for score in scores)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"tokens": (), "first": 1}, "1 <= first"),
        ({"tokens": (1, 2), "first": 2}, "1 <= first"),
        ({"tokens": (1, 2), "first": 0}, "1 <= first"),
        ({"tokens": (1, VOCABULARY), "first": 1}, "token ids below"),
        ({"tokens": (1,) * 130, "first": 1}, "at most 129 tokens"),
        ({"tokens": (1, 2), "first": 1, "temperature": -1.0}, "temperature"),
        ({"tokens": (1, 2), "first": 1, "top_k": VOCABULARY + 1}, "top_k"),
    ],
    ids=str,
)
def test_bad_scores_are_refused_alone(serve, model, bad, says):
    path, dtype = model

    async def scenario(engine):
        with pytest.raises(EngineError, match=says):
            await engine.score(ScoreRequest(id="bad", **bad))
        return await engine.score(item(1, length=129))

    assert serve(scenario, path=path, dtype=dtype, kv_tokens=128).logprobs


def test_an_aborted_score_says_so_and_a_cancelled_one_is_dropped(serve, model):
    path, dtype = model

    async def scenario(engine):
        long = asyncio.create_task(engine.generate(sample(1, max_tokens=200)))
        scoring = [asyncio.create_task(engine.score(item(number, length=200))) for number in (1, 2)]
        await asyncio.sleep(0)
        await engine.abort("s1")
        scoring[1].cancel()
        results = await asyncio.gather(*scoring, return_exceptions=True)
        await long
        await engine.score(item(3))
        return results, engine.metrics["kv_bytes_now"] == 0

    (aborted, cancelled), free = serve(scenario, path=path, dtype=dtype, max_running=1)
    assert isinstance(aborted, EngineError) and "aborted" in str(aborted)
    assert isinstance(cancelled, asyncio.CancelledError) and free
