"""What an update does with requests under way, and what is left of it when something fails on the way."""

import asyncio
from dataclasses import replace

import pytest
import torch
from suite import short_of

from sparring.engine.config import EngineConfig, UpdateConfig
from sparring.errors import EngineError, WeightsError
from sparring.generation import GenerateRequest, Sampling
from sparring.testing.tiny_models import VOCABULARY, tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Room for requests so long that none ends by itself before the update comes."""
    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("model") / "long", tied=True, seed=4, max_position_embeddings=8192
    )


@pytest.fixture(scope="module")
def trained(model_path, references):
    return references(model_path)


def request(number=0, tokens=None, conversation=None, **sampling):
    return GenerateRequest(
        id=str(number),
        tokens=tokens or tuple((5 * number + 7 * j) % VOCABULARY for j in range(23 + number)),
        sampling=Sampling(**{"max_tokens": 30, "seed": number, **sampling}),
        conversation=conversation,
    )


def content(completion):
    return completion.tokens, completion.logprobs


async def until_held(engine):
    """Until an update waits for the requests under way."""
    while not engine._worker.scheduler.draining and engine.metrics["running_now"]:
        await asyncio.sleep(0)


async def across(engine, refs, **settings):
    """A long request that samples under version 0 and then as long again, with a crowd beside it; updated in
    between."""
    crowd = [asyncio.create_task(engine.generate(request(number, max_tokens=400))) for number in range(1, 9)]
    stream = engine.stream(request(max_tokens=8000, **settings))
    for ref in (*refs, None):
        # what lies there unread is of the version before
        await anext(stream)
        seen = 0
        while seen < 20:
            seen += len((await anext(stream)).tokens)
        if ref:
            await engine.pull(ref)
    await engine.abort("0")
    *_, answer = [piece async for piece in stream]
    return answer, await asyncio.gather(*crowd)


def test_keep_continues_with_old_keys_and_records_their_version(serve, model_path, trained):
    async def scenario(engine):
        answer, crowd = await across(engine, trained, conversation="c")
        again = await engine.generate(request(tokens=(*request().tokens, *answer.tokens, 5), conversation="c"))
        return answer, crowd, again

    answer, crowd, again = serve(scenario, path=model_path, live_kv="keep")
    assert answer.versions.values == (0, 1, 2) and answer.kv_versions.values == (0,)
    assert sum(answer.versions.lengths) == len(answer.tokens) and again.cached_tokens == 0
    assert all(len(a.versions) == len(a.tokens) == 400 for a in crowd)


def test_recompute_gives_the_tokens_of_the_new_weights_alone(serve, model_path, trained):
    async def scenario(engine):
        return await across(engine, trained, conversation="c")

    answer, crowd = serve(scenario, path=model_path, live_kv="recompute")
    assert answer.versions.values == (0, 1, 2)
    assert all(a.kv_versions == a.versions for a in (answer, *crowd))
    assert any(len(a.versions.values) > 1 for a in crowd)

    async def since(engine):
        """Every request from where its last version began, on an engine that never served another."""
        await engine.pull(trained[-1])
        found = []
        for number, a in enumerate((answer, *crowd)):
            if a.versions.values[-1] == 2:
                begin = len(a.tokens) - a.versions.lengths[-1]
                tokens = (*request(number).tokens, *a.tokens[:begin])
                fresh = await engine.generate(request(number, tokens=tokens, max_tokens=a.versions.lengths[-1]))
                found.append((content(fresh), (a.tokens[begin:], a.logprobs[begin:])))
        return found

    compared = serve(since, path=model_path)
    assert compared and all(fresh == went_on for fresh, went_on in compared)


def test_drain_waits_for_running_requests_and_admits_no_others(serve, model_path, trained):
    async def scenario(engine):
        stream = engine.stream(request(max_tokens=8000))
        await anext(stream)
        pull = asyncio.create_task(engine.pull(trained[0]))
        await until_held(engine)
        late = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(0)
        await engine.abort("0")
        *_, answer = [piece async for piece in stream]
        await pull
        return answer, await late, engine.version

    answer, late, version = serve(scenario, path=model_path, live_kv="drain")
    assert (answer.versions.values, answer.kv_versions.values, answer.finish_reason) == ((0,), (0,), "abort")
    assert (late.versions.values, late.kv_versions.values, version) == ((1,), (1,), 1)


def test_drain_finishes_preempted_requests(serve, model_path, trained):
    async def scenario(engine):
        begun = [engine.stream(request(number, max_tokens=300)) for number in range(6)]
        await asyncio.gather(*map(anext, begun))
        await engine.pull(trained[0])
        ends = [[piece async for piece in stream][-1] for stream in begun]
        return ends, engine.metrics["preemptions"]

    ends, preemptions = serve(scenario, path=model_path, live_kv="drain", kv_tokens=768)
    assert preemptions > 0
    assert all(end.versions.values == (0,) and len(end.tokens) == 300 for end in ends)


def test_a_late_update_is_withdrawn_for_good_and_the_old_version_serves_on(serve, model_path, trained):
    async def scenario(engine):
        before = await engine.generate(request())
        crowd = [asyncio.create_task(engine.generate(request(number, max_tokens=8000))) for number in range(1, 30)]
        begun = engine.stream(request(30, max_tokens=8000))
        await anext(begun)
        with pytest.raises(
            WeightsError,
            match="not applied within engine.update.timeout_s = 0.3; the engine keeps serving the old version",
        ):
            await engine.pull(trained[0])
        beside = asyncio.create_task(engine.generate(request()))
        for number in range(1, 31):
            await engine.abort(str(number))
        await asyncio.gather(*crowd)
        assert [piece async for piece in begun][-1].finish_reason == "abort"
        after = [await beside, await engine.generate(request())]
        version = engine.version
        await engine.pull(trained[0])
        return before, after, version, engine.version, await engine.generate(request())

    before, after, version, healed, new = serve(scenario, path=model_path, live_kv="drain", update_timeout_s=0.3)
    assert [content(answer) for answer in after] == [content(before)] * 2 != [content(new)] * 2
    assert (version, healed, new.versions.values) == (0, 1, (1,))


def test_weights_that_do_not_arrive_in_time_are_late(serve, model_path, trained):
    async def scenario(engine):
        with pytest.raises(WeightsError, match="the engine keeps serving the old version"):
            await engine.pull(trained[0])
        return engine.version

    assert serve(scenario, path=model_path, update_timeout_s=1e-9) == 0


class Unreadable(torch.Tensor):
    """Can be hashed, so that it is staged; copying from it fails, as from a device that is lost."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise RuntimeError("the device is lost")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("live_kv", ["keep", "recompute", "drain"])
@pytest.mark.parametrize("which", short_of([0, 7, -1], [7]), ids=["first", "middle", "last"])
def test_a_copy_that_fails_in_the_middle_is_rolled_back(serve, model_path, trained, live_kv, which):
    state = dict(trained[0].location)
    name = list(state)[which]
    broken = replace(trained[0], location=state | {name: state[name].as_subclass(Unreadable)})

    async def scenario(engine):
        begun = asyncio.create_task(engine.generate(request(1, max_tokens=400)))
        with pytest.raises(WeightsError, match="the device is lost"):
            await engine.pull(broken)
        served = engine.version, content(await begun), content(await engine.generate(request()))
        await engine.pull(trained[0])
        return served, engine.version, content(await engine.generate(request()))

    async def untouched(engine):
        return 0, content(await engine.generate(request(1, max_tokens=400))), content(await engine.generate(request()))

    async def updated(engine):
        await engine.pull(trained[0])
        return content(await engine.generate(request()))

    served, version, healed = serve(scenario, path=model_path, live_kv=live_kv)
    assert served == serve(untouched, path=model_path)
    assert (version, healed) == (1, serve(updated, path=model_path))


@pytest.mark.parametrize("live_kv", ["keep", "drain"])
def test_a_caller_cancelled_at_any_moment_leaves_one_complete_version(serve, model_path, trained, live_kv):
    async def reference(engine):
        before = content(await engine.generate(request()))
        await engine.pull(trained[0])
        return before, content(await engine.generate(request()))

    async def gone_after(engine, turns):
        pull = asyncio.create_task(engine.pull(trained[0]))
        for _ in range(turns):
            await asyncio.sleep(0)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        answer = await engine.generate(request())
        await engine.pull(trained[0])
        return content(answer), answer.versions.values[0], engine.version, engine.metrics["updates"]

    expected = serve(reference, path=model_path)
    for turns in (0, 1, 2, 5, 20, 100, 2000):
        found, version, at_last, updates = serve(
            lambda engine: gone_after(engine, turns), path=model_path, live_kv=live_kv
        )
        assert found == expected[version] and (at_last, updates) == (1, 1)


def test_the_served_version_is_acknowledged_again(serve, model_path, trained):
    async def scenario(engine):
        await engine.pull(trained[0])
        await engine.pull(trained[0])
        with pytest.raises(WeightsError, match="expected a version above the served 1"):
            await engine.pull(replace(trained[1], version=1))
        return engine.version, engine.metrics["updates"]

    assert serve(scenario, path=model_path) == (1, 1)


def test_closing_answers_an_update_that_waits(serve, model_path, trained):
    async def scenario(engine):
        stream = engine.stream(request(max_tokens=8000))
        await anext(stream)
        pull = asyncio.create_task(engine.pull(trained[0]))
        await until_held(engine)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await pull
        with pytest.raises(EngineError, match="closed"):
            _ = [piece async for piece in stream]

    serve(scenario, path=model_path, live_kv="drain")


def test_a_timeout_of_nothing_is_refused():
    with pytest.raises(ValueError, match="timeout_s must be above 0"):
        EngineConfig(update=UpdateConfig(timeout_s=0.0))
