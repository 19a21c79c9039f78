"""The engine's answers do not depend on what happens around a request, and nothing that goes wrong leaves a caller
waiting."""

import asyncio
import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from sparring.engine.native import NativeEngine
from sparring.errors import EngineError
from sparring.generation import GenerateRequest, Runs, Sampling, ScoreRequest
from sparring.kernels import ops
from sparring.kernels.compiled.library import COMPILED
from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]

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


def all_requests():
    drawn = {
        "temperature": (1.0, 0.6, 0.0),
        "top_k": (0, 5),
        "top_p": (1.0, 1.0, 1.0, 0.9),
        "min_p": (0.0, 0.0, 0.0, 0.0, 0.3),
    }
    return [request(i, **{name: values[i % len(values)] for name, values in drawn.items()}) for i in range(32)]


def content(completion):
    return completion.tokens, completion.logprobs, completion.finish_reason


async def generate_together(engine):
    return [content(answer) for answer in await asyncio.gather(*map(engine.generate, all_requests()))]


@pytest.fixture
def reference(model_path, kernel_path):
    """Every request by a naive loop: the whole sequence through the training forward for each token."""
    return recomputed_logprobs(model_path, kernel_path)


@cache
def recomputed_logprobs(model_path, kernel_path):
    model = load(model_path)
    answers = []
    with torch.inference_mode():
        for item in all_requests():
            tokens, logprobs, sampling = list(item.tokens), [], item.sampling
            while True:
                hidden = model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), Packed.of([len(tokens)]))
                token, logprob, _ = ops.sample(
                    model.logits(hidden[-1:]),
                    torch.tensor([sampling.temperature]),
                    torch.tensor([sampling.top_k]),
                    torch.tensor([sampling.top_p]),
                    torch.tensor([sampling.min_p]),
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
        {"max_tokens": 2048},
        {"max_running": 7, "max_tokens": 8},
        {"max_running": 1},
        {"share_prefixes": False},
        {"kv_tokens": 192},
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_those_of_full_recomputation(serve, reference, settings):
    assert serve(generate_together, **settings) == reference
    assert {answer[2] for answer in reference} == {"stop", "length"}


def test_preemption_changes_no_bit(serve, reference):
    async def scenario(engine):
        return await generate_together(engine), engine.metrics["preemptions"]

    answers, preemptions = serve(scenario, kv_tokens=192, max_running=8)
    assert answers == reference
    assert preemptions > 0


def test_alone_one_by_one(serve, reference):
    async def scenario(engine):
        return [content(await engine.generate(item)) for item in all_requests()[:8]]

    assert serve(scenario) == reference[:8]


def test_more_stops_than_a_call_of_several_steps_knows(serve, reference):
    async def scenario(engine):
        many = [replace(item, sampling=replace(item.sampling, stop=(*range(-12, 0), 3))) for item in all_requests()]
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
        for before, after in itertools.pairwise(talk):
            assert after.cached_tokens == length + len(before.tokens) - 1
            length += len(before.tokens) + 3


@pytest.mark.parametrize(("length", "found"), [(40, 32), (32, 31), (33, 32), (16, 15), (15, 0)])
def test_a_group_computes_its_prompt_once(serve, length, found):
    prompt = tuple(range(length))

    async def scenario(engine):
        group = [request(i, tokens=prompt, max_tokens=6) for i in range(8)]
        answers = await asyncio.gather(*map(engine.generate, group))
        return [content(a) for a in answers], [a.cached_tokens for a in answers], engine.metrics["prefill_tokens"]

    shared, cached, prefilled = serve(scenario, max_tokens=512)
    alone, none, all_prefilled = serve(scenario, max_tokens=512, share_prefixes=False)
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
        return results, engine.metrics

    results, metrics = serve(scenario)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert metrics["running_now"] == metrics["waiting_now"] == metrics["kv_bytes_now"] == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"tokens": (1, VOCABULARY)}, "token ids below"),
        ({"tokens": tuple(range(50)) * 6}, "fewer than 256 tokens"),
        ({"tokens": (1,) * 100, "max_tokens": 100}, "within the cache of 128 tokens"),
        ({"max_tokens": 0}, "max_tokens of at least 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p above 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p from 0"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1 << 70}, "top_k"),
        ({"stop": (1 << 70,)}, "stop tokens"),
        ({"logit_bias": ((VOCABULARY, 1.0),)}, "each biased token once and below"),
        ({"logit_bias": ((-1, 1.0),)}, "each biased token"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "each biased token once"),
        ({"logit_bias": ((1, float("nan")),)}, "a bias from"),
        ({"logit_bias": ((1, float("inf")),)}, "a bias from"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens from 0 to max_tokens"),
        ({"min_tokens": 2, "stop": tuple(range(VOCABULARY))}, "one token that is not in stop"),
        ({"top_logprobs": 21}, "0 to 20 top_logprobs"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(serve, bad, says):
    async def scenario(engine):
        with pytest.raises(EngineError, match=says):
            await engine.generate(request(1, **bad))
        return await engine.generate(request(1))

    assert serve(scenario, kv_tokens=128).tokens


def test_a_bad_request_does_not_touch_the_others(serve):
    """Everything that is refused comes in between requests that are running."""
    bad = (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"logit_bias": ((VOCABULARY, 1.0),)},
        {"top_k": 1 << 70},
    )

    async def scenario(engine):
        jobs = [engine.generate(request(i, **limits)) for i in range(5) for limits in ({}, bad[i])]
        return await asyncio.gather(*jobs, return_exceptions=True)

    async def healthy(engine):
        return await asyncio.gather(*(engine.generate(request(i)) for i in range(5)))

    answers = serve(scenario)
    assert all(isinstance(answer, EngineError) for answer in answers[1::2])
    assert [content(answer) for answer in answers[::2]] == [content(answer) for answer in serve(healthy)]


def test_a_biased_logit_and_a_minimum_of_tokens(serve, model_path):
    """The log-probabilities are those of the logits that were changed, at the temperature, among what is left."""
    bias, stop = ((7, 2.5), (9, -1e30), (3, 1.0)), (3, 7)
    requests = [
        request(i, temperature=0.8, top_k=(0, 12)[i % 2], logit_bias=bias, min_tokens=6, stop=stop, top_logprobs=4)
        for i in range(8)
    ]

    async def scenario(engine):
        return await asyncio.gather(*map(engine.generate, requests))

    model, ended = load(model_path), 0
    for item, answer in zip(requests, serve(scenario), strict=True):
        assert len(answer.tokens) >= 6 and not set(stop) & set(answer.tokens[:5]) and 9 not in answer.tokens
        ended += answer.finish_reason == "stop"
        tokens = torch.tensor([*item.tokens, *answer.tokens])
        with torch.inference_mode():
            logits = model.logits(
                model.hidden(tokens[:-1], torch.arange(len(tokens) - 1), Packed.of([len(tokens) - 1]))
            )
        for place, token in enumerate(answer.tokens):
            row = logits[len(item.tokens) - 1 + place].double()
            for biased, value in bias:
                row[biased] += value
            if place < 6:
                row[list(stop)] = -torch.inf
            kept = list(answer.kept.ids(place)) if item.sampling.top_k else list(range(VOCABULARY))
            assert not item.sampling.top_k or sorted(row.topk(12).indices.tolist()) == kept
            expected = torch.log_softmax(row[kept] / 0.8, 0)
            assert abs(expected[kept.index(token)] - answer.logprobs[place]) < 1e-5
            best = expected.topk(4)
            assert [told for told, _ in answer.top_logprobs[place]] == [kept[i] for i in best.indices.tolist()]
            assert torch.allclose(
                torch.tensor([told for _, told in answer.top_logprobs[place]]), best.values.float(), atol=1e-5
            )
            assert all(told == answer.logprobs[place] for other, told in answer.top_logprobs[place] if other == token)
    assert ended > 0


def test_a_minimum_of_tokens_beyond_the_stops_of_a_call(serve):
    """More stop tokens than a slot of the kernels has room for."""
    stop = tuple(range(2, 70))

    async def scenario(engine):
        return await asyncio.gather(
            *(engine.generate(request(i, stop=stop, min_tokens=9, top_logprobs=1)) for i in range(6))
        )

    for answer in serve(scenario):
        assert (
            not set(answer.tokens[:9]) & set(stop)
            and answer.finish_reason == "stop"
            and len(answer.top_logprobs) == len(answer.tokens)
        )


@pytest.mark.kernel_paths(*COMPILED)
def test_a_turn_ends_where_the_caller_says(serve):
    """Whatever the number of tokens that a call of the kernels samples; a stop token that comes first wins."""
    asked = []

    def ends(tokens, new):
        asked.append((len(tokens), new))
        return next((n for n in range(len(tokens) - new + 1, len(tokens) + 1) if n % 7 == 0), None)

    async def scenario(engine):
        requests = [request(i, max_tokens=(5, 20)[i % 2], stop=(), min_tokens=(0, 9)[i % 4 // 2]) for i in range(8)]
        requests = [
            replace(
                item,
                sampling=replace(item.sampling, min_tokens=min(item.sampling.min_tokens, item.sampling.max_tokens)),
            )
            for item in requests
        ]
        free = await asyncio.gather(*map(engine.generate, requests))
        ended = [await engine.generate(replace(item, ends=ends)) for item in requests]
        stop = free[1].tokens[3]
        stopped = await engine.generate(
            replace(requests[1], ends=ends, sampling=replace(requests[1].sampling, stop=(stop,)))
        )
        return requests, free, ended, stopped, free[1].tokens.index(stop) + 1

    requests, free, ended, stopped, first = serve(scenario)
    for item, all_of_it, answer in zip(requests, free, ended, strict=True):
        wanted = 5 if item.sampling.max_tokens == 5 else 14 if item.sampling.min_tokens else 7
        assert (answer.tokens, answer.logprobs) == (all_of_it.tokens[:wanted], all_of_it.logprobs[:wanted])
        assert answer.finish_reason == ("length" if wanted == 5 else "stop") and len(answer.versions) == wanted
    assert (len(stopped.tokens), stopped.finish_reason) == (first, "stop")
    assert max(new for _, new in asked) > 1, "several tokens of one call"


@pytest.mark.parametrize("said", [0, 99, "text"])
def test_a_watcher_that_breaks_fails_its_own_request(serve, said):
    async def scenario(engine):
        def broken(tokens, new):
            return said

        answers = await asyncio.gather(
            engine.generate(replace(request(1), ends=broken)), engine.generate(request(2)), return_exceptions=True
        )
        return answers, engine.metrics["running_now"], content(await engine.generate(request(2)))

    (failed, fine), busy, again = serve(scenario)
    assert isinstance(failed, EngineError) and "its stop function `ends`" in str(failed)
    assert content(fine) == again and not busy


def test_only_allowed_tokens_come_and_the_log_probability_is_among_them(serve):
    """Odd after even and even after odd, alone and beside requests without a limit, preempted too."""

    def allowed(tokens):
        even = not tokens or tokens[-1] % 2
        return bytes([0b01010101 if even else 0b10101010] * (VOCABULARY // 8))

    async def scenario(engine):
        limited = [
            request(i, temperature=(1.0, 0.0)[i % 3 // 2], top_p=(1.0, 0.9)[i % 2], stop=(), top_logprobs=3)
            for i in range(9)
        ]
        jobs = [engine.generate(replace(item, allowed=allowed)) for item in limited] + [
            engine.generate(request(i)) for i in range(9)
        ]
        return limited, await asyncio.gather(*jobs), engine.metrics["preemptions"]

    async def free(engine):
        return [content(await engine.generate(request(i))) for i in range(9)]

    limited, answers, _ = serve(scenario)
    assert [content(answer) for answer in answers[9:]] == serve(free)
    for item, answer in zip(limited, answers, strict=False):
        assert [token % 2 for token in answer.tokens] == [place % 2 for place in range(len(answer.tokens))]
        assert all(token % 2 == place % 2 for place, top in enumerate(answer.top_logprobs) for token, _ in top)
        if item.sampling.temperature and item.sampling.top_p == 1:
            assert all(
                answer.kept.ids(place) == tuple(range(place % 2, VOCABULARY, 2)) for place in range(len(answer.tokens))
            )
    _, again, preemptions = serve(scenario, kv_tokens=192, max_running=8)
    assert preemptions > 0
    assert [(content(answer), answer.kept, answer.top_logprobs) for answer in again] == [
        (content(a), a.kept, a.top_logprobs) for a in answers
    ]


@pytest.mark.parametrize("answer", [bytes(VOCABULARY // 8), bytes(1000), b"", "text", None])
def test_a_limit_that_leaves_nothing_fails_its_own_request(serve, answer):
    async def scenario(engine):
        bad = replace(request(1), allowed=lambda tokens: bytes([255] * 10) if len(tokens) < 2 else answer)
        answers = await asyncio.gather(engine.generate(bad), engine.generate(request(2)), return_exceptions=True)
        with pytest.raises(EngineError, match="min_tokens 0 with a constraint"):
            await engine.generate(replace(request(3, min_tokens=2), allowed=lambda tokens: bytes([255] * 10)))
        return answers, engine.metrics["running_now"], content(await engine.generate(request(2)))

    (failed, fine), busy, again = serve(scenario)
    assert isinstance(failed, EngineError) and "its constraint `allowed`" in str(failed)
    assert content(fine) == again and not busy


def test_the_last_position_ends_a_request(serve):
    async def scenario(engine):
        return await engine.generate(request(1, tokens=(5,) * 250, max_tokens=99, stop=()))

    answer = serve(scenario)
    assert (len(answer.tokens), answer.finish_reason) == (6, "length")


def test_a_crashed_step_fails_its_requests_and_the_engine_goes_on(serve):
    """One weight of a wrong shape makes every forward raise until it is put right."""

    async def scenario(engine):
        norm = engine.model.module.model.norm
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


def test_closing_fails_running_requests_and_refuses_new_ones(serve):
    async def scenario(engine):
        # seconds of work, of which some has begun: however late this thread gets its turn, there is something left to
        # fail
        tasks = [asyncio.create_task(engine.generate(request(i, max_tokens=200, stop=()))) for i in range(300)]
        await engine.score(PAIR)
        await engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for call in (engine.generate(request(1)), engine.score(PAIR)):
            with pytest.raises(EngineError, match="closed"):
                await call
        await engine.close()
        return results

    results = serve(scenario)
    whole = [result for result in results if not isinstance(result, EngineError)]
    assert len(whole) < len(results)
    assert all(len(completion.tokens) == 200 for completion in whole)


def test_prompt_log_probabilities_are_returned_on_request(serve):
    async def scenario(engine):
        item = request(4, temperature=0.8, top_k=3)
        told = await engine.generate(replace(item, prompt_logprobs=True))
        one = await engine.generate(replace(item, tokens=(5,), prompt_logprobs=True))
        return (
            told,
            await engine.generate(item),
            await engine.score(ScoreRequest(id="s", tokens=item.tokens, temperature=0.8)),
            one,
        )

    told, plain, scores, one = serve(scenario)
    assert told.prompt_logprobs == scores.logprobs and len(scores.logprobs) == len(request(4).tokens) - 1
    assert one.prompt_logprobs == () and plain.prompt_logprobs is None
    assert content(told) == content(plain)


def test_two_event_loops_can_ask_one_engine(model_path):
    from sparring.engine.config import EngineConfig

    engine = NativeEngine(load(model_path), EngineConfig(), threads=1)
    first = asyncio.run(engine.generate(request(1)))
    second = asyncio.run(engine.generate(request(1)))
    asyncio.run(engine.close())
    assert content(first) == content(second)
    assert first.versions == Runs.of(0, len(first.tokens))
