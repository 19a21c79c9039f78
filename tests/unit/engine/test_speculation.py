"""Speculation changes how many steps a request takes, and nothing else."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.engine.config import EngineConfig
from sparring.engine.kv import KvCache
from sparring.engine.ngram import LONGEST, Lookup
from sparring.engine.scheduler import StepScheduler
from sparring.engine.sequence import Sequence
from sparring.engine.speculation import Speculation
from sparring.errors import EngineError
from sparring.generation import GenerateRequest, Sampling
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 9), min_size=1), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_the_guess_is_what_followed_the_longest_match_last_time(tokens, pieces, most):
    lookup, known = Lookup(), 1
    for piece in pieces:
        said = tokens[:known]
        expected = []
        for length in range(min(LONGEST, known), 0, -1):
            found = [end for end in range(length, known) if said[end - length : end] == said[-length:]]
            if found:
                expected = said[found[-1] : found[-1] + most]
                break
        assert lookup.guess(list(said), most) == expected
        known = min(len(tokens), known + piece)


def even(tokens):
    return bytes([0b01010101] * (VOCABULARY // 8))


def requests():
    """Text that repeats itself, sampled in every way there is."""
    ways = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3, "top_p": 0.9},
        {"temperature": 0.5, "top_k": 4, "min_p": 0.05, "top_logprobs": 3},
        {"temperature": 0.4, "logit_bias": ((5, 3.0), (9, -4.0)), "min_tokens": 12, "stop": (7, 8, 11, 12, 13)},
        {"temperature": 0.3, "stop": (5, 40)},
        {"temperature": 0.0, "stop": (*range(60, 80),), "top_logprobs": 2},
        {
            "temperature": 0.6,
            "ends": lambda tokens, new: next(
                (n for n in range(len(tokens) - new + 1, len(tokens) + 1) if tokens[n - 1] % 9 == 0), None
            ),
        },
        {"temperature": 0.4, "allowed": even},
    ]
    made = []
    for number, way in enumerate(ways * 2):
        way = dict(way)
        watched = {name: way.pop(name) for name in ("ends", "allowed") if name in way}
        prompt = tuple((number * 3 + j % (2 + number % 5)) % VOCABULARY for j in range(3 + 5 * number % 31))
        sampling = Sampling(max_tokens=25 + number, seed=number, **way)
        made.append(
            GenerateRequest(id=str(number), tokens=prompt, sampling=sampling, conversation=f"c{number}", **watched)
        )
    return made


async def answers(engine, count=None):
    """Each request and one behind it in its conversation; what the engine counted."""
    first = await asyncio.gather(*map(engine.generate, requests()[:count]))
    again = [
        replace(asked, id=f"{asked.id} again", tokens=(*asked.tokens, *answer.tokens, 1, 2, 3))
        for asked, answer in zip(requests(), first, strict=False)
    ]
    second = await asyncio.gather(*map(engine.generate, again))
    return [*first, *second], engine.metrics


async def one_by_one(engine):
    found = [await engine.generate(asked) for asked in requests()]
    return found, engine.metrics


@pytest.fixture(scope="module", params=["qwen3", "olmo2"])
def path(request, tmp_path_factory):
    """One of the family that is served in one call a step, and one that is not."""
    return tiny_model(request.param, tmp_path_factory.mktemp("model") / request.param, seed=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_running": 3},
        {"kv_tokens": 192, "max_running": 8},
        {"speculation_tokens": 9},
        {"share_prefixes": False},
    ],
    ids=str,
)
def test_every_bit_is_that_of_ordinary_generation(serve, path, dtype, limits):
    ordinary, without = serve(
        answers, path=path, dtype=dtype, **{k: v for k, v in limits.items() if k != "speculation_tokens"}
    )
    guessed, counted = serve(answers, path=path, dtype=dtype, speculation="ngram", **limits)
    assert [replace(answer, cached_tokens=0) for answer in guessed] == [
        replace(answer, cached_tokens=0) for answer in ordinary
    ]
    assert without["drafted_tokens"] == 0 and 0 < counted["accepted_tokens"] < counted["drafted_tokens"]
    assert counted["generated_tokens"] >= sum(len(answer.tokens) for answer in guessed)


def test_alone_it_takes_fewer_steps(serve, path):
    ordinary, without = serve(one_by_one, path=path)
    guessed, counted = serve(one_by_one, path=path, speculation="ngram")
    assert guessed == ordinary
    assert counted["steps"] < 0.9 * without["steps"]
    assert counted["accepted_tokens"] > 0


def test_only_few_are_guessed_for_and_only_while_all_generate():
    cache = KvCache(400, 4, share_prefixes=False)
    work, speculation = (
        StepScheduler(cache, max_running=32, max_batch_tokens=999),
        Speculation(EngineConfig(speculation="ngram")),
    )

    def plan(count):
        work.clear()
        for number in range(count):
            asked = GenerateRequest(id=str(number), tokens=(1, 2, 3, 4, 1, 2, 3), sampling=Sampling(max_tokens=40))
            work.add(Sequence.of(asked, Future(), arrival=number, max_new=40, keep=False))
        prompts = work.plan(0)
        for chunk in prompts:
            chunk.sequence.extend([4], [-1.0], 0)
        return prompts, work.plan(0)

    for count, room in ((1, 4), (3, 4), (4, 3), (8, 1)):
        prompts, generating = plan(count)
        assert not speculation.applies(prompts) and speculation.applies(generating)
        assert speculation.drafts(generating, work) == [[1, 2, 3, 4][:room]] * count
    _, generating = plan(9)
    assert not speculation.applies(generating) and not Speculation(EngineConfig()).applies(plan(1)[1])


def test_no_more_is_guessed_than_may_be_sampled_and_fits():
    work = StepScheduler(KvCache(3, 4, share_prefixes=False), max_running=2, max_batch_tokens=99)
    speculation = Speculation(EngineConfig(speculation="ngram", speculation_tokens=9))

    def drafts(prompt, most):
        asked = GenerateRequest(id="a", tokens=prompt, sampling=Sampling(max_tokens=most))
        work.clear()
        work.add(Sequence.of(asked, Future(), arrival=0, max_new=most, keep=False))
        work.plan(0)[0].sequence.extend([1], [-1.0], 0)
        return speculation.drafts(work.plan(0), work)

    assert drafts((1, 2, 3), 9) == [[2, 3, 1]]
    assert drafts((1, 2, 3), 4) == [[2, 3]], "one token is sampled behind the guessed ones"
    assert drafts((1, 2, 3), 2) is None
    assert drafts((1, 2, 3, 4, 5, 6, 7, 8), 9) == [[2, 3, 4]], "no further than the pages reach"
    assert drafts((2, 3, 4), 9) is None, "nothing said before is like the last token"


def test_a_stream_and_a_cut_are_the_same(serve, path):
    """Pieces hold every token once; an aborted request goes on where it was."""

    async def scenario(engine):
        asked = requests()[1]
        whole = await engine.generate(asked)
        pieces = [piece async for piece in engine.stream(replace(asked, id="streamed"))]
        part = replace(asked, id="part", sampling=replace(asked.sampling, max_tokens=7))
        first = await engine.generate(part)
        rest = await engine.generate(
            replace(
                asked,
                id="rest",
                tokens=(*asked.tokens, *first.tokens),
                sampling=replace(asked.sampling, max_tokens=asked.sampling.max_tokens - 7),
            )
        )
        return whole, pieces, first, rest

    whole, pieces, first, rest = serve(scenario, path=path, speculation="ngram")
    assert [token for piece in pieces[:-1] for token in piece.tokens] == list(whole.tokens) == list(pieces[-1].tokens)
    assert (*first.tokens, *rest.tokens) == whole.tokens and (*first.logprobs, *rest.logprobs) == whole.logprobs


def test_a_bad_setting_is_refused(serve, path):
    with pytest.raises(ValueError, match="speculation_tokens must be at least 1"):
        serve(one_by_one, path=path, speculation_tokens=0)


def test_a_watcher_that_breaks_fails_its_own_request(serve, path):
    """In the middle of a draft too."""

    def broken(tokens, new):
        if len(tokens) > 9:
            raise KeyError("broken")

    async def scenario(engine):
        asked = requests()[1]
        bad = replace(asked, id="bad", ends=broken)
        return await asyncio.gather(*map(engine.generate, (asked, bad)), return_exceptions=True)

    good, bad = serve(scenario, path=path, speculation="ngram")
    assert isinstance(bad, EngineError) and good == serve(scenario, path=path)[0]


def test_an_update_on_the_way_is_recorded_per_token(serve, tmp_path):
    """What was guessed is computed by the weights that are served, and recomputed with everything else."""
    path = tiny_model("qwen3", tmp_path / "long", tied=True, seed=4, max_position_embeddings=8192)
    model = load(path)
    with torch.no_grad():
        for name, parameter in model.state().items():
            parameter.mul_(1.3 if "mlp" in name else 1.0)
    ref = publish("policy", 1, model.state())
    asked = replace(requests()[2], sampling=Sampling(temperature=0.3, seed=4, max_tokens=8000))

    async def scenario(engine):
        stream = engine.stream(asked)
        await anext(stream)
        await engine.pull(ref)
        # what lies there unread is of the version before
        await anext(stream)
        seen, before = 0, engine.metrics["accepted_tokens"]
        # at which token the update comes is chance, and so is which guess is the first to hold after it
        while seen < 40 or engine.metrics["accepted_tokens"] == before:
            seen += len((await anext(stream)).tokens)
        await engine.abort(asked.id)
        *_, answer = [piece async for piece in stream]
        return answer, engine.metrics["accepted_tokens"] - before

    async def since(engine):
        await engine.pull(ref)
        begin = answer.versions.lengths[0]
        sampling = replace(asked.sampling, max_tokens=len(answer.tokens) - begin)
        fresh = await engine.generate(replace(asked, tokens=(*asked.tokens, *answer.tokens[:begin]), sampling=sampling))
        return (fresh.tokens, fresh.logprobs), (answer.tokens[begin:], answer.logprobs[begin:])

    answer, accepted = serve(scenario, path=path, speculation="ngram", live_kv="recompute")
    assert accepted > 0 and answer.versions.values == answer.kv_versions.values == (0, 1)
    fresh, went_on = serve(since, path=path)
    assert fresh == went_on
