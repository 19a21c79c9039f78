"""Adapters come, change and go while an engine serves: nobody is served by another one's weights, keys or values."""

import asyncio
from dataclasses import replace

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from tables import with_settings

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import EngineError, WeightsError
from sparring.generation import GenerateRequest, Sampling, ScoreRequest
from sparring.kernels.compiled.library import COMPILED
from sparring.model.load import load
from sparring.model.lora import SCALE
from sparring.model.peft import read
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish

# in plain torch these take minutes
pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths("best", *COMPILED, portable=False)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Room for requests so long that none ends by itself before the update comes."""
    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("base") / "long", tied=True, seed=4, max_position_embeddings=8192
    )


@pytest.fixture(scope="module")
def states(base, tmp_path_factory):
    """Three adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    return [read(tiny_adapter(base, folder / str(seed), seed=seed)) for seed in range(3)]


@pytest.fixture
def run(base):
    """Run `scenario(engine)` on a fresh engine of the base."""

    def served(scenario, **settings):
        async def main():
            config = with_settings(
                EngineConfig(), **{"max_running": 16, "max_tokens": 64, "kv_tokens": 16384, **settings}
            )
            engine = NativeEngine(load(base), config, threads=1)
            try:
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    return served


def ref(state, name="a", version=1, probe=None):
    return publish("policy", version, state, probe, adapter=name)


def request(number=0, adapter="a", conversation=None, tokens=None, **sampling):
    return GenerateRequest(
        id=f"{adapter}{number}",
        tokens=tokens or tuple((5 * number + 7 * j) % VOCABULARY for j in range(50 + number)),
        sampling=Sampling(**{"max_tokens": 20, "seed": number, **sampling}),
        conversation=conversation,
        adapter=adapter,
    )


def content(completion):
    return completion.tokens, completion.logprobs


async def served_by(engine, state, name, version=1, **settings):
    await engine.pull(ref(state, name, version))
    return await engine.generate(request(adapter=name, **settings))


def test_an_unknown_adapter_fails_only_its_own_request(run, states):
    async def scenario(engine):
        await engine.pull(ref(states[0]))
        asked = [
            engine.generate(request()),
            engine.generate(request(adapter="b")),
            engine.generate(request(adapter=None)),
        ]
        score = ScoreRequest(id="s", tokens=(1, 2, 3), adapter="c")
        return await asyncio.gather(*asked, engine.score(score), return_exceptions=True)

    fine, unknown, plain, score = run(scenario)
    assert len(fine.tokens) == len(plain.tokens) == 20
    assert (
        isinstance(unknown, EngineError)
        and "adapter b: expected a loaded adapter" in str(unknown)
        and "loaded: a" in str(unknown)
    )
    assert isinstance(score, EngineError)


def test_no_adapter_finds_what_another_has_computed(run, states):
    """By prefix and by conversation: each request is as on an engine of its own, and finds only what is its
    adapter's."""
    names = (None, "a", "b")

    async def scenario(engine):
        for name, state in zip(names[1:], states, strict=False):
            await engine.pull(ref(state, name))
        answers = [await engine.generate(request(adapter=name, conversation="c")) for name in names for _ in range(2)]
        return answers, [await engine.generate(request(adapter=name, conversation="c")) for name in names]

    async def alone(engine):
        answers = []
        for name, state in zip(names, (None, *states), strict=False):
            await engine.pull(ref(state, name)) if name else None
            answers.append(content(await engine.generate(request(adapter=name))))
        return answers

    twice, again = run(scenario)
    expected = run(alone, share_prefixes=False, kv_across_turns="drop")
    assert [answer.cached_tokens > 0 for answer in twice] == [False, True] * 3
    assert [content(a) for a in twice] == [answer for answer in expected for _ in range(2)]
    assert [content(a) for a in again] == expected and len(set(expected)) == 3


def test_pages_of_a_swapped_adapter_are_not_found(run, states):
    """Nor what a dropped adapter of the same name and version has left."""

    async def scenario(engine):
        answers = [await served_by(engine, states[0], "a", conversation="c")]
        answers.append(await served_by(engine, states[1], "a", version=2, conversation="c"))
        await engine.drop("a")
        answers.append(await served_by(engine, states[2], "a", version=2, conversation="c"))
        return answers

    async def alone(engine):
        return [content(await served_by(engine, state, name)) for state, name in zip(states, "xyz", strict=True)]

    answers = run(scenario)
    assert [content(answer) for answer in answers] == run(alone)
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0]
    assert [answer.versions.values for answer in answers] == [(1,), (2,), (2,)]


async def swap_twice(engine, states, crowd_of=("a", "b", None)):
    """A long request under an adapter that is swapped twice meanwhile, among others."""
    await engine.pull(ref(states[0], "a"))
    await engine.pull(ref(states[1], "b"))
    crowd = [asyncio.create_task(engine.generate(request(n, crowd_of[n % 3], max_tokens=300))) for n in range(1, 9)]
    stream = engine.stream(request(max_tokens=8000))
    for version, state in ((2, states[1]), (3, states[2]), (None, None)):
        await anext(stream)  # what lies there unread is of the version before
        seen = 0
        while seen < 20:
            seen += len((await anext(stream)).tokens)
        if version:
            await engine.pull(ref(state, "a", version))
    await engine.abort("a0")
    *_, answer = [piece async for piece in stream]
    return answer, await asyncio.gather(*crowd)


def test_a_swap_in_flight_is_recorded(run, states):
    answer, crowd = run(lambda engine: swap_twice(engine, states), live_kv="keep")
    assert answer.versions.values == (1, 2, 3) and answer.kv_versions.values == (1,)
    answer, crowd = run(lambda engine: swap_twice(engine, states), live_kv="recompute")
    assert answer.versions.values == answer.kv_versions.values == (1, 2, 3)
    assert all(len(other.tokens) == 300 for other in crowd)


def test_a_draining_swap_waits_for_running_requests(run, states):
    async def scenario(engine):
        await engine.pull(ref(states[0]))
        stream = engine.stream(request(max_tokens=400))
        await anext(stream)
        await engine.pull(ref(states[1], version=2))
        *_, answer = [piece async for piece in stream]
        return answer, await engine.generate(request())

    answer, after = run(scenario, live_kv="drain")
    assert answer.versions.values == answer.kv_versions.values == (1,) and len(answer.tokens) == 400
    assert after.versions.values == after.kv_versions.values == (2,)


def test_a_swap_does_not_touch_the_others(run, states):
    _, crowd = run(lambda engine: swap_twice(engine, states), live_kv="keep")

    async def alone(engine):
        await engine.pull(ref(states[1], "b"))
        numbers = [n for n in range(1, 9) if n % 3]
        return {n: content(await engine.generate(request(n, ("a", "b", None)[n % 3], max_tokens=300))) for n in numbers}

    for number, expected in run(alone).items():
        assert content(crowd[number - 1]) == expected and len(crowd[number - 1].versions.values) == 1


def test_recompute_gives_the_tokens_of_the_new_adapter_alone(run, states):
    async def scenario(engine):
        answer, _ = await swap_twice(engine, states)
        first = len(answer.tokens) - answer.versions.lengths[-1]
        tokens = (*request().tokens, *answer.tokens[:first])
        rest = await engine.generate(request(tokens=tokens, max_tokens=answer.versions.lengths[-1]))
        return (answer.tokens[first:], answer.logprobs[first:]), content(rest)

    found, expected = run(scenario, live_kv="recompute")
    assert found == expected


def test_a_dropped_adapter_finishes_running_requests_and_refuses_new_ones(run, states):
    async def scenario(engine):
        await engine.pull(ref(states[0]))
        stream = engine.stream(request(max_tokens=400))
        await anext(stream)
        await engine.drop("a")
        with pytest.raises(EngineError, match="adapter a: expected a loaded adapter"):
            await engine.generate(request(1))
        with pytest.raises(EngineError, match="adapter a"):
            await engine.drop("a")
        await engine.pull(ref(states[1], "a"))  # under the old name, beside the one that leaves
        fresh = await engine.generate(request())
        *_, answer = [piece async for piece in stream]
        return (
            answer,
            fresh,
            await served_by(engine, states[0], "again", max_tokens=400),
            list(engine.model.adapters.by_number),
        )

    answer, fresh, expected, placed = run(scenario)
    assert content(answer) == content(expected) and len(answer.tokens) == 400
    assert fresh.logprobs != answer.logprobs[: len(fresh.logprobs)]
    assert len(placed) == 2  # the one that left is gone


@pytest.mark.parametrize(
    "settings", [{}, {"kv_across_turns": "offload", "kv_idle_bytes": 1}], ids=["here", "in host memory"]
)
def test_parked_pages_of_a_dropped_adapter_are_freed(run, states, settings):
    """At a swap, and at a drop as soon as nobody is served by it any more; what others keep stays."""

    async def scenario(engine):
        async def kept():
            await engine.generate(request(9, adapter=None, max_tokens=1))  # whoever has to make room has made it then
            return engine.metrics["kv_idle_bytes_now"] + engine.metrics["kv_host_bytes_now"]

        await engine.pull(ref(states[0]))
        for number, adapter in enumerate((None, "a", "a")):
            await engine.generate(request(number, adapter, conversation=str(number)))
        found = [await kept()]
        await engine.pull(ref(states[1], version=2))
        found.append(await kept())
        await engine.generate(request(1, conversation="1"))
        stream = engine.stream(request(3, max_tokens=7000, conversation="3"))
        await anext(stream)
        await engine.drop("a")
        found.append(await kept())
        await engine.abort("a3")
        async for _ in stream:
            pass
        return [*found, await kept()]

    found = run(scenario, **settings)
    assert found == [3 * found[1], found[1], 2 * found[1], found[1]] and found[1] > 0


def damaged_refs(state):
    good = ref(state, version=2)
    name = next(name for name in state if name != SCALE)
    other = {**good.location, name: good.location[name] + 1}
    wide = {**state, name: torch.zeros(4, 7)}
    stranger = {
        "lm_head.lora_A.weight": torch.zeros(4, 48),
        "lm_head.lora_B.weight": torch.zeros(VOCABULARY, 4),
        SCALE: state[SCALE],
    }
    yield "expected checksum", replace(good, location=other)
    yield "log-probabilities", ref(state, version=2, probe=((1, 2, 3), (-1.0, -1.0)))
    yield "log-probabilities", ref(state, version=2, probe=((1, 2, 3), (float("nan"), -1.0)))
    yield "factors of a layer", ref(wide, version=2)
    yield "linear layers of the model", ref(stranger, version=2)
    yield "two factors for each layer", ref({name: state[name], SCALE: state[SCALE]}, version=2)
    yield "expected a version above the served 1", ref(state, version=1)
    yield "expected a version above the served 1", ref(state, version=0)


def test_a_failed_update_leaves_the_old_one_serving(run, states):
    async def scenario(engine):
        before = await served_by(engine, states[0], "a")
        for message, bad in damaged_refs(states[1]):
            with pytest.raises(WeightsError, match=message):
                await engine.pull(bad)
            assert content(await engine.generate(request())) == content(before)
            with pytest.raises(WeightsError):  # nor is anything left of one that never served
                await engine.pull(replace(bad, adapter="new", version=2, probe=bad.probe or ((1, 2), (0.5,))))
            with pytest.raises(EngineError, match="loaded: a"):
                await engine.generate(request(adapter="new"))
        return before, engine.metrics["updates"]

    before, updates = run(scenario)
    assert updates == 1 and before.versions.values == (1,)


def test_the_same_version_again_is_acknowledged(run, states):
    async def scenario(engine):
        for _ in range(3):
            await engine.pull(ref(states[0]))
        return engine.metrics["updates"]

    assert run(scenario) == 1


def test_the_base_does_not_change_below_its_adapters(run, states, base):
    weights = publish("policy", 1, load(base).state())

    async def scenario(engine):
        await engine.pull(ref(states[0]))
        with pytest.raises(WeightsError, match="got base weights"):
            await engine.pull(weights)
        await engine.drop("a")
        await engine.pull(weights)
        return engine.version

    assert run(scenario) == 1


def test_two_concurrent_loads_both_succeed(run, states):
    """StagedWeights side by side, before the model has had any adapter."""

    async def scenario(engine):
        await asyncio.gather(*(engine.pull(ref(state, name)) for name, state in zip("abc", states, strict=True)))
        return [content(await engine.generate(request(adapter=name))) for name in "abc"]

    async def alone(engine):
        return [content(await served_by(engine, state, "a", version)) for version, state in enumerate(states, 1)]

    assert run(scenario) == run(alone)


def test_the_engines_own_adapter_serves_requests_without_a_name(run, states):
    async def scenario(engine):
        plain = await engine.generate(request(adapter=None))
        await engine.pull(ref(states[0], "policy", version=7))
        answers = [await engine.generate(request(adapter=name)) for name in (None, "policy")]
        return plain, answers, engine.version

    plain, (own, named), version = run(scenario)
    assert content(own) == content(named) != content(plain)
    assert plain.versions.values == (0,) and own.versions.values == (7,) and version == 7


def test_scores_and_interruptions_are_the_adapters(run, states):
    async def scenario(engine):
        await engine.pull(ref(states[0], "b"))
        await engine.pull(ref(states[1], "a"))
        whole = await engine.generate(request(max_tokens=60, conversation=None))
        tokens, count = (*request().tokens, *whole.tokens), len(request().tokens)
        score = await engine.score(ScoreRequest(id="s", tokens=tokens, first=count, adapter="a"))
        other = await engine.score(ScoreRequest(id="s", tokens=tokens, first=count, adapter="b"))
        asked = await engine.generate(replace(request(tokens=tokens, max_tokens=1), prompt_logprobs=True))
        stream = engine.stream(request(max_tokens=4000))
        first = await anext(stream)
        await engine.abort("a0")
        *_, cut = [piece async for piece in stream]
        return whole, score, other, asked, first, cut

    whole, score, other, asked, first, cut = run(scenario)
    assert score.logprobs == whole.logprobs != other.logprobs and score.version == 1
    assert asked.prompt_logprobs[-len(whole.tokens) :] == whole.logprobs
    assert cut.tokens[: len(first.tokens)] == first.tokens and cut.tokens[:60] == whole.tokens[: len(cut.tokens)]
