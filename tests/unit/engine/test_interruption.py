"""A request can be ended, continued and watched, and none of it shows in its tokens."""

import asyncio
from dataclasses import replace

import pytest
import torch
from suite import short_of

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.engine.worker import steps_at
from sparring.errors import EngineError
from sparring.generation import Completion, GenerateRequest, Sampling
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Room for requests so long that none ends by itself before it is interrupted."""
    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("model") / "long", tied=True, seed=4, max_position_embeddings=8192
    )


def request(number, *, tokens=None, conversation=None, **sampling):
    length = 1 + (13 * number) % 50
    return GenerateRequest(
        id=str(number),
        tokens=tokens or tuple((5 * number + 7 * j) % VOCABULARY for j in range(length)),
        sampling=Sampling(
            **{"max_tokens": 60 + number % 5, "seed": number, "temperature": (1.0, 0.6)[number % 2], **sampling}
        ),
        conversation=conversation,
    )


def after(item, done):
    """The request that goes on where `done` ends."""
    left = item.sampling.max_tokens - len(done.tokens)
    return replace(item, tokens=(*item.tokens, *done.tokens), sampling=replace(item.sampling, max_tokens=left))


async def aborted(engine, item, most):
    """Ended once `most` tokens were seen; whole where it was done by then."""
    seen = 0
    async for piece in engine.stream(item):
        if isinstance(piece, Completion):
            return piece
        seen += len(piece.tokens)
        if seen >= most:
            await engine.abort(item.id)


async def in_cuts(engine, item, most):
    """(tokens, log-probabilities, finish reason) of a request that is ended and continued again and again; the number
    of cuts."""
    tokens, logprobs, cuts = (), (), 0
    while True:
        piece = await aborted(engine, item, most)
        tokens, logprobs = tokens + piece.tokens, logprobs + piece.logprobs
        if piece.finish_reason != "abort":
            return (tokens, logprobs, piece.finish_reason), cuts
        item, cuts = after(item, piece), cuts + 1


def content(completion):
    return completion.tokens, completion.logprobs, completion.finish_reason


def all_free(engine):
    return engine.metrics["kv_bytes_now"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 2048},
        {"max_running": 1},
        {"max_running": 3, "max_tokens": 7},
        {"share_prefixes": False},
        {"kv_tokens": 512, "max_running": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("keep", short_of([False, True], [True]), ids=["", "conversations"])
def test_abort_and_continue_gives_the_tokens_of_an_uninterrupted_run(serve, model_path, settings, keep):
    items = [
        request(number, conversation=str(number) if keep else None, max_tokens=300 + number) for number in range(12)
    ]

    async def whole(engine):
        return [content(answer) for answer in await asyncio.gather(*map(engine.generate, items))], engine.metrics[
            "preemptions"
        ]

    async def cut(engine):
        found = await asyncio.gather(*(in_cuts(engine, item, 4 + 3 * i) for i, item in enumerate(items)))
        for item in items:
            await engine.release(str(item.conversation))
        await engine.generate(request(0, max_tokens=1))
        return [answer for answer, _ in found], sum(cuts for _, cuts in found), all_free(engine)

    answers, cuts, free = serve(cut, path=model_path, **settings)
    # who is cut often enough never needs much room at once, so whether that run preempts hangs on when the cuts come
    expected, preemptions = serve(whole, path=model_path, **settings)
    assert answers == expected and (preemptions > 0) is ("kv_tokens" in settings)
    assert cuts > 0 and free


def test_every_cut_continues_bitwise(serve, model_path):
    async def scenario(engine):
        item = request(7, max_tokens=50)
        whole = await engine.generate(item)
        halves = [replace(whole, tokens=whole.tokens[:cut], logprobs=whole.logprobs[:cut]) for cut in range(50)]
        rests = await asyncio.gather(*(engine.generate(after(item, half)) for half in halves))
        return [content(whole)] * 50, [
            (h.tokens + r.tokens, h.logprobs + r.logprobs, r.finish_reason) for h, r in zip(halves, rests, strict=True)
        ]

    expected, found = serve(scenario, path=model_path)
    assert found == expected


def test_abort_ends_only_the_requests_of_that_id_and_says_so(serve, model_path):
    async def scenario(engine):
        long = request(1, max_tokens=8000)
        tasks = [asyncio.create_task(engine.generate(item)) for item in (long, long, request(2))]
        await engine.abort("never heard of")
        other = await tasks[2]
        await engine.abort("1")
        return await asyncio.gather(*tasks[:2]), other, engine.metrics

    (one, same), other, metrics = serve(scenario, path=model_path)
    assert one.finish_reason == same.finish_reason == "abort" and other.finish_reason == "length"
    assert 0 < len(one.tokens) == len(one.logprobs) == len(one.versions) == len(one.kv_versions) < 8000
    assert metrics["generated_tokens"] < 16_000


def test_a_waiting_request_is_aborted_without_tokens(serve, model_path):
    async def scenario(engine):
        first = asyncio.create_task(engine.generate(request(1, max_tokens=8000)))
        waiting = asyncio.create_task(engine.generate(request(2)))
        await asyncio.sleep(0)
        await engine.abort("2")
        answer = await waiting
        await engine.abort("1")
        await first
        return content(answer), len(answer.versions), await engine.generate(request(2))

    nothing, versions, after_it = serve(scenario, path=model_path, max_running=1)
    assert (nothing, versions) == (((), (), "abort"), 0)
    assert len(after_it.tokens) == 62


def test_an_aborted_conversation_continues_without_prefill(serve, model_path):
    async def scenario(engine):
        item = request(3, conversation="c", max_tokens=8000)
        done = await aborted(engine, item, 20)
        rest = await engine.generate(
            replace(request(3, tokens=item.tokens + done.tokens, max_tokens=5), conversation="c")
        )
        return len(item.tokens) + len(done.tokens), rest.cached_tokens

    length, cached = serve(scenario, path=model_path, share_prefixes=False)
    assert cached == length - 1


def test_an_aborted_request_continues_under_the_served_weights(serve, model_path):
    changed = load(model_path)
    with torch.no_grad():
        for name, parameter in changed.state().items():
            parameter.mul_(1.3 if "mlp" in name else 1.0)

    async def scenario(engine):
        item = request(3, conversation="c", max_tokens=8000)
        cut = await aborted(engine, item, 20)
        await engine.pull(publish("policy", 1, changed.state()))
        longer = request(3, tokens=item.tokens + cut.tokens, max_tokens=30)
        return cut, await engine.generate(replace(longer, conversation="c")), await engine.generate(longer)

    async def before(engine):
        return await engine.generate(request(3, tokens=request(3).tokens + cut.tokens, max_tokens=30))

    cut, rest, fresh = serve(scenario, path=model_path)
    assert (cut.versions.values, rest.versions.values, rest.kv_versions.values) == ((0,), (1,), (1,))
    assert content(rest) == content(fresh) != content(serve(before, path=model_path))
    assert rest.cached_tokens == 0


def test_a_turn_that_goes_on_keeps_its_ends_and_allowed_functions(serve, model_path):
    """Each token says how many of the turn came before it, and the turn ends after 30 of them."""

    def allowed(tokens):
        return (1 << len(tokens) % VOCABULARY).to_bytes(-(-VOCABULARY // 8), "little")

    def ends(tokens, new):
        return 30 if len(tokens) >= 30 else None

    async def scenario(engine):
        item = replace(request(1, max_tokens=100), allowed=allowed, ends=ends)
        begun = await engine.generate(replace(item, sampling=replace(item.sampling, max_tokens=7)))
        return begun, await engine.generate(item.after(begun.tokens))

    begun, rest = serve(scenario, path=model_path)
    assert [*begun.tokens, *rest.tokens] == list(range(30))
    assert (len(begun.tokens), begun.finish_reason, rest.finish_reason) == (7, "length", "stop")


async def pieces_of(engine, item):
    return [piece async for piece in engine.stream(item)]


def test_a_stream_is_the_completion_in_pieces(serve, model_path):
    items = [request(number, max_tokens=1000) for number in range(6)]

    async def scenario(engine):
        streamed = await asyncio.gather(*(pieces_of(engine, item) for item in items))
        return streamed, [content(await engine.generate(item)) for item in items]

    streamed, whole = serve(scenario, path=model_path)
    for (*deltas, last), expected in zip(streamed, whole, strict=True):
        assert content(last) == expected
        assert tuple(token for delta in deltas for token in delta.tokens) == last.tokens
        assert tuple(logprob for delta in deltas for logprob in delta.logprobs) == last.logprobs
        assert all(delta.tokens for delta in deltas)
    assert max(map(len, streamed)) > 2


def test_pieces_come_as_often_as_the_pace_of_the_steps_allows():
    assert [steps_at(pace_s, 16) for pace_s in (1e-5, 0.005, 0.02, 3.0)] == [16, 4, 1, 1]


def test_a_slow_reader_delays_no_request_and_misses_no_token(serve, model_path):
    async def scenario(engine):
        slow = engine.stream(request(1, max_tokens=2000))
        first = await anext(slow)
        others = await asyncio.gather(*(engine.generate(request(number)) for number in range(2, 9)))
        await engine.generate(request(1, max_tokens=2000))
        *rest, last = [piece async for piece in slow]
        return first, rest, last, [other.finish_reason for other in others]

    first, rest, last, others = serve(scenario, path=model_path)
    assert others == ["length"] * 7
    assert len(rest) == 1 and first.tokens + rest[0].tokens == last.tokens
    assert first.logprobs + rest[0].logprobs == last.logprobs


def test_leaving_a_stream_drops_the_request(serve, model_path):
    async def scenario(engine):
        stream = engine.stream(request(1, max_tokens=8000))
        await anext(stream)
        await stream.aclose()
        await engine.generate(request(2, max_tokens=1))
        return all_free(engine), engine.metrics

    free, metrics = serve(scenario, path=model_path)
    assert free and metrics["running_now"] == 0 and metrics["generated_tokens"] < 8000


def test_a_reader_with_a_closed_loop_fails_no_other_request(model_path):
    engine = NativeEngine(load(model_path), EngineConfig(), threads=1)
    loop = asyncio.new_event_loop()
    stream = engine.stream(request(1, max_tokens=2000))
    loop.run_until_complete(anext(stream))
    loop.close()
    answer = asyncio.run(engine.generate(request(2)))
    asyncio.run(engine.close())
    assert answer.finish_reason == "length"


def test_a_stream_ends_with_the_error_after_its_tokens(serve, model_path):
    async def scenario(engine):
        stream, got = engine.stream(request(1, max_tokens=8000)), []
        got.append(await anext(stream))
        norm = engine.model.module.model.norm
        right, norm.weight = norm.weight, torch.nn.Parameter(torch.ones(3))
        with pytest.raises(EngineError):
            async for piece in stream:
                got.append(piece)
        norm.weight = right
        return got, await engine.generate(request(1))

    got, again = serve(scenario, path=model_path)
    seen = tuple(token for piece in got for token in piece.tokens)
    assert seen[:60] == again.tokens[: len(seen)][:60]


def test_a_bad_streamed_request_is_refused_alone(serve, model_path):
    async def scenario(engine):
        with pytest.raises(EngineError, match="token ids below"):
            await pieces_of(engine, request(1, tokens=(1, VOCABULARY)))
        return await pieces_of(engine, request(1))

    assert len(serve(scenario, path=model_path)) > 1
