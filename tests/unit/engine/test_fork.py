"""A branch of a live request has the tokens of a request that was always its own, and computes nothing of its prefix
again."""

import asyncio
from dataclasses import replace

import pytest
import torch
from suite import short_of

from sparring.errors import EngineError
from sparring.generation import Completion, GenerateRequest, Sampling
from sparring.kernels.compiled.library import COMPILED
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish

# in plain torch these take minutes
pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths("best", *COMPILED, portable=False)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Room for requests so long that none ends by itself before it is forked."""
    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("model") / "long", tied=True, seed=4, max_position_embeddings=8192
    )


def request(number, prompt=21, **sampling):
    return GenerateRequest(
        id=str(number),
        tokens=tuple((5 * number + 7 * j) % VOCABULARY for j in range(prompt)),
        sampling=Sampling(**{"max_tokens": 8000, "seed": number, **sampling}),
    )


def short(branch, tokens=40):
    return replace(branch, sampling=replace(branch.sampling, max_tokens=tokens))


def names(number, count):
    return {f"{number}/{i}": 1000 * number + i for i in range(count)}


async def forked(engine, item, seen, count):
    """The branches of a request that has sampled at least `seen` tokens, and its stream, which is still open."""
    stream, got = engine.stream(item), 0
    while got < seen:
        got += len((await anext(stream)).tokens)
    return stream, await engine.fork(item.id, names(int(item.id), count))


async def ended(engine, stream, item):
    await engine.abort(item.id)
    *_, last = [piece async for piece in stream]
    return last


def fresh(serve, path, branches):
    """Each branch's answer as a request of its own, one at a time, nothing kept, nothing shared."""

    async def scenario(engine):
        return [content(await engine.generate(replace(branch, conversation=None))) for branch in branches]

    return serve(scenario, path=path, share_prefixes=False)


def content(completion):
    return completion.tokens, completion.logprobs, completion.finish_reason


async def free_after_release(engine, branches):
    for branch in branches:
        await engine.release(branch.conversation)
    await engine.generate(request(0, max_tokens=1))
    return engine._worker.scheduler.cache.pool.num_free == engine._worker.scheduler.cache.pool.num_pages


@pytest.mark.parametrize("seen", short_of([1, 11, 40], [11]))
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("alive", [True, False], ids=["beside the request", "after it"])
def test_branches_equal_fresh_requests_and_compute_no_prefix(serve, model_path, seen, share, alive):
    item = request(3)

    async def scenario(engine):
        stream, branches = await forked(engine, item, seen, 6)
        whole = None if alive else await ended(engine, stream, item)
        read = engine.metrics["prefill_tokens"]
        answers = await asyncio.gather(*(engine.generate(short(branch)) for branch in branches))
        read = engine.metrics["prefill_tokens"] - read
        whole = whole or await ended(engine, stream, item)
        return (
            branches,
            [content(answer) for answer in answers],
            read,
            whole,
            await free_after_release(engine, branches),
        )

    branches, answers, read, whole, free = serve(scenario, path=model_path, share_prefixes=share, max_tokens=64)
    assert answers == fresh(serve, model_path, map(short, branches))
    assert len({answer[0] for answer in answers}) == 6
    # of each branch the one token that nobody had computed yet: the last that was sampled
    assert read == 6
    assert free
    [start] = {branch.tokens for branch in branches}
    assert len(start) >= 21 + seen and start == (*item.tokens, *whole.tokens)[: len(start)]
    assert [branch.sampling.max_tokens for branch in branches] == [8000 - (len(start) - 21)] * 6
    assert [content(whole)[0]] == [answer[0] for answer in fresh(serve, model_path, [short(item, len(whole.tokens))])]


def test_a_branch_can_be_streamed_aborted_and_forked_again(serve, model_path):
    async def scenario(engine):
        item = request(5)
        first, [branch] = await forked(engine, item, 5, 1)
        second = engine.stream(branch)
        got = await anext(second)
        twigs = await engine.fork(branch.id, names(77, 3))
        read = engine.metrics["prefill_tokens"]
        answers = await asyncio.gather(*(engine.generate(short(twig)) for twig in twigs))
        read = engine.metrics["prefill_tokens"] - read
        ends = [await ended(engine, first, item), await ended(engine, second, branch)]
        free = await free_after_release(engine, (branch, *twigs))
        return twigs, [content(answer) for answer in answers], read, got, ends, free

    twigs, answers, read, got, (_, trunk), free = serve(scenario, path=model_path)
    assert answers == fresh(serve, model_path, map(short, twigs))
    assert read == 3 and free
    assert got.tokens == trunk.tokens[: len(got.tokens)] and trunk.finish_reason == "abort"


@pytest.mark.parametrize("kv_tokens", [640, 1024])
def test_forks_in_a_crowd_with_too_little_room(serve, model_path, kv_tokens):
    """Idle branches lose their pages, requests are preempted, and none of it shows."""

    async def family(engine, number):
        item = request(number, prompt=1 + 9 * number, max_tokens=150)
        stream = engine.stream(item)
        try:
            await anext(stream)
            branches = await engine.fork(item.id, names(number, 3))
        except EngineError:
            return [], []
        answers = await asyncio.gather(*(engine.generate(short(branch, 90)) for branch in branches))
        *_, _ = [piece async for piece in stream]
        return branches, [content(answer) for answer in answers]

    async def scenario(engine):
        families = await asyncio.gather(*(family(engine, number) for number in range(1, 9)))
        branches = [branch for found, _ in families for branch in found]
        free = await free_after_release(engine, branches)
        return branches, [answer for _, found in families for answer in found], free, engine.metrics["preemptions"]

    branches, answers, free, preemptions = serve(scenario, path=model_path, kv_tokens=kv_tokens)
    assert len(branches) >= 12 and free and preemptions > 0
    assert answers == fresh(serve, model_path, [short(branch, 90) for branch in branches])


def test_released_branches_return_their_pages(serve, model_path):
    async def scenario(engine):
        item = request(2)
        stream, branches = await forked(engine, item, 20, 4)
        await ended(engine, stream, item)
        held = engine._worker.scheduler.cache.pool.num_pages - engine._worker.scheduler.cache.pool.num_free
        return held, len(branches[0].tokens), await free_after_release(engine, branches)

    held, length, free = serve(scenario, path=model_path)
    assert held == -(-(length - 1) // 16) and free


def test_a_branch_asked_for_after_an_update_is_computed_under_the_new_weights(serve, model_path):
    changed = load(model_path)
    with torch.no_grad():
        for name, parameter in changed.state().items():
            parameter.mul_(1.3 if "mlp" in name else 1.0)

    async def scenario(engine):
        item = request(4)
        stream, (before, behind) = await forked(engine, item, 10, 2)
        await engine.pull(publish("policy", 1, changed.state()))
        first = await engine.generate(short(before))
        late = await engine.fork(item.id, {"late": 5})
        await ended(engine, stream, item)
        plain = [await engine.generate(replace(short(branch), conversation=None)) for branch in (before, *late)]
        return (
            [first, await engine.generate(short(*late))],
            plain,
            await free_after_release(engine, (before, behind, *late)),
        )

    answers, plain, free = serve(scenario, path=model_path)
    assert [content(answer) for answer in answers] == [content(answer) for answer in plain]
    assert [answer.kv_versions.values for answer in answers] == [(1,), (1,)]
    assert free


def test_branches_keep_the_turns_ends_and_allowed_functions(serve, model_path):
    """Each token says how many came before it, and the turn ends after 3000 of them, wherever it was forked."""

    def allowed(tokens):
        return (1 << len(tokens) % VOCABULARY).to_bytes(-(-VOCABULARY // 8), "little")

    def ends(tokens, new):
        return 3000 if len(tokens) >= 3000 else None

    async def scenario(engine):
        item = replace(request(1), allowed=allowed, ends=ends)
        stream, branches = await forked(engine, item, 7, 2)
        answers = [await engine.generate(branch) for branch in branches]
        return item, branches, answers, await ended(engine, stream, item)

    item, branches, answers, _ = serve(scenario, path=model_path, kv_tokens=40_000)
    for branch, answer in zip(branches, answers, strict=True):
        made = branch.tokens[len(item.tokens) :]
        assert [*made, *answer.tokens] == [i % VOCABULARY for i in range(3000)]
        assert len(made) >= 7 and answer.finish_reason == "stop"


def test_a_branch_samples_the_rest_of_min_tokens(serve, model_path):
    async def scenario(engine):
        item = request(1, min_tokens=5000)
        stream, [branch] = await forked(engine, item, 7, 1)
        await ended(engine, stream, item)
        return item, branch

    item, branch = serve(scenario, path=model_path)
    assert branch.sampling.min_tokens == 5000 - (len(branch.tokens) - len(item.tokens))


def test_only_one_live_request_can_be_forked(serve, model_path):
    async def scenario(engine):
        with pytest.raises(EngineError, match="got 0"):
            await engine.fork("never heard of", {"a": 1})
        both = [asyncio.create_task(engine.generate(request(1))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="got 2"):
            await engine.fork("1", {"a": 1})
        await engine.abort("1")
        answers = await asyncio.gather(*both)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.fork("1", {"a": 1})
        return answers

    assert all(isinstance(answer, Completion) for answer in serve(scenario, path=model_path))


def test_a_request_that_waits_can_be_forked(serve, model_path):
    async def scenario(engine):
        first = asyncio.create_task(engine.generate(request(1)))
        waiting = asyncio.create_task(engine.generate(request(2, max_tokens=30)))
        await asyncio.sleep(0)
        [branch] = await engine.fork("2", {"b": 9})
        await engine.abort("1")
        await asyncio.gather(first, waiting)
        return branch, content(await engine.generate(branch)), await free_after_release(engine, [branch])

    branch, answer, free = serve(scenario, path=model_path, max_running=1)
    assert (branch.tokens, branch.sampling.max_tokens, branch.sampling.seed) == (request(2).tokens, 30, 9)
    assert [answer] == fresh(serve, model_path, [branch]) and free
