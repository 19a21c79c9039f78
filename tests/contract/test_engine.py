"""What every `Engine` keeps. A new implementation adds a factory to `ENGINES`.

Engines that are not exact are spared, where it says `exact`: bits that do not depend on the neighbours, random numbers
that depend on nothing but the seed and the place (so that an aborted request goes on with the same tokens), and KV that
is found to the token.
"""

import asyncio
import math
from dataclasses import replace

import pytest

from sparring.engine.turn_pieces import completed, joined
from sparring.errors import EngineError, WeightsError
from sparring.generation import Completion, GenerateRequest, Sampling, ScoreRequest
from sparring.kernels.compiled.library import COMPILED
from sparring.protocols import Engine
from sparring.testing.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.usefixtures("kernel_path")
STOP = 3
PROMPT = (5, 6, 7, 8, 9, 10)


def scripted(path):
    """Says tokens that are a function of the seed and the position, up to position 3500; for odd seeds the one at
    position 14 is the stop token."""

    def script(request):
        return [
            STOP if request.sampling.seed % 2 and at == 14 else (request.sampling.seed + at) % 40 + 10
            for at in range(len(request.tokens), 3500)
        ]

    return ScriptedEngine(script, version=4, latency_s=0.01)


def native(path):
    from sparring.engine.config import BatchConfig, EngineConfig
    from sparring.engine.native import NativeEngine
    from sparring.model.load import load

    return NativeEngine(load(path), EngineConfig(batch=BatchConfig(max_running=8)), version=4, threads=1)


def watched(path):
    from sparring.observe.hooks import timed
    from sparring.observe.spans import Spans
    from sparring.stages.runtime.timing import ENGINE_SPANS

    return timed(scripted(path), Spans(), ENGINE_SPANS)


def remote(path):
    from common.served import RemoteToThread

    return RemoteToThread(native(path), path)


def openai(path):
    from completions_server import CompletionsServer

    from sparring.engine.adapters.openai_compatible import OpenAiEngine

    class WithServer(OpenAiEngine):
        async def close(self):
            await super().close()
            await asyncio.to_thread(server.stop)

    server = CompletionsServer(native(path))
    return WithServer(server.url, version=4)


def vllm(path):
    from real_vllm import CONFIG, real_vllm

    from sparring.engine.adapters.vllm import VllmEngine

    server = real_vllm(path)
    server.ask("POST", "/reset_prefix_cache")  # another engine before this one had the same server
    return VllmEngine(server, CONFIG, version=4, keep_server=True)


def served_vllm(path):
    from common.served import RemoteToThread

    return RemoteToThread(vllm(path), path)


def fleet(path):
    from common.served import RemoteToThread

    from sparring.engine.fleet import Fleet

    return Fleet([RemoteToThread(native(path), path) for _ in range(2)])


ENGINES = {
    "native": native,
    "scripted": scripted,
    "watched": watched,
    "remote": remote,
    "fleet": fleet,
    "openai": openai,
    "vllm": vllm,
    "served vllm": served_vllm,
}
KEEPS_NOTHING = {openai}
REFUSED = {
    "score": {
        "scripted": "a model's distribution, got a scripted engine",
        "watched": "a model's distribution, got a scripted engine",
        "openai": "temperature 1 from an OpenAI-compatible server, got 0.8",
    },
    "pull": {"openai": "an engine that takes weight updates, got an OpenAI-compatible server"},
    "sleep": {
        "openai": "an engine that can sleep, got an OpenAI-compatible server",
        "vllm": "an engine that can sleep, got vLLM",
        "served vllm": "an engine that can sleep, got vLLM",
    },
}
"""Which engines say by name that they cannot do it."""
INEXACT = {vllm, served_vllm}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from sparring.testing.tiny_models import tiny_model

    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("model") / "tiny", seed=4, max_position_embeddings=4096, head_dim=32
    )


def engines(names=tuple(ENGINES)):
    """As parameters. One alone computes in this process."""
    others = {name: [pytest.mark.kernel_paths("best")] for name in ENGINES if name != "native"}
    for name in ("vllm", "served vllm"):
        others[name].append(pytest.mark.vllm)
    for name in ("remote", "openai", "fleet"):  # tests/unit/engine has much of theirs
        others[name].append(pytest.mark.full)
    return [pytest.param(ENGINES[name], id=name, marks=others.get(name, ())) for name in names]


def able_to(verb):
    """For a test of what some engines refuse: those that do it."""
    return pytest.mark.parametrize(
        "make", engines([name for name in ENGINES if name not in REFUSED[verb]]), indirect=True
    )


def unable_to(verb):
    """The others, with what they say."""
    refused = [
        pytest.param(*one.values, said, id=one.id, marks=one.marks)
        for said, one in zip(REFUSED[verb].values(), engines(REFUSED[verb]), strict=True)
    ]
    return pytest.mark.parametrize(("make", "said"), refused, indirect=["make"])


@pytest.fixture(params=engines())
def make(request):
    return request.param


@pytest.fixture
def exact(make):
    """Whether the engine keeps every bit."""
    return make not in INEXACT


@pytest.fixture
def serve(make, model_path):
    def run(scenario):
        async def main():
            engine = make(model_path)
            try:
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    run.keeps = make not in KEEPS_NOTHING
    return run


def turn(seed=1, tokens=PROMPT, conversation=None, **sampling):
    sampling = Sampling(**{"max_tokens": 12, "seed": seed, "stop": (STOP,), **sampling})
    return GenerateRequest(id=f"r{seed}", tokens=tokens, sampling=sampling, conversation=conversation)


def same(answers, others, exact):
    """Equal tokens; log-probabilities equal to the bit, or nearly."""
    if exact:
        return [(a.tokens, a.logprobs) for a in answers] == [(b.tokens, b.logprobs) for b in others]
    return all(
        a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for a, b in zip(answers, others, strict=True)
    )


def test_it_is_an_engine_with_a_version(serve):
    async def scenario(engine):
        return isinstance(engine, Engine), engine.version

    assert serve(scenario) == (True, 4)


def test_every_token_has_a_probability_a_version_and_a_kv_version(serve):
    async def scenario(engine):
        return await asyncio.gather(*(engine.generate(turn(seed)) for seed in range(12)))

    for answer in serve(scenario):
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions) == len(answer.kv_versions) > 0
        assert all(logprob <= 0 for logprob in answer.logprobs)
        assert set(answer.versions.expand()) == set(answer.kv_versions.expand()) == {4}


def test_a_stop_token_ends_the_turn_and_is_part_of_it(serve):
    async def scenario(engine):
        return await asyncio.gather(*(engine.generate(turn(seed, max_tokens=60)) for seed in range(24)))

    answers = serve(scenario)
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped
    assert all(STOP not in answer.tokens[:-1] for answer in answers)
    assert all((answer.tokens[-1] == STOP) == (answer.finish_reason == "stop") for answer in answers)


def test_max_tokens_ends_the_turn(serve):
    async def scenario(engine):
        return await engine.generate(turn(2, max_tokens=4, stop=()))

    answer = serve(scenario)
    assert (len(answer.tokens), answer.finish_reason) == (4, "length")


def test_the_seed_decides_not_the_neighbours(serve, exact):
    async def alone(engine):
        return [await engine.generate(turn(seed)) for seed in range(6)]

    async def together(engine):
        return await asyncio.gather(*(engine.generate(turn(seed)) for seed in range(6)))

    one, other = serve(alone), serve(together)
    assert same(one, other, exact)
    assert len({a.tokens for a in one}) > 1


def test_a_conversation_is_kept_until_it_is_released(serve):
    async def scenario(engine):
        first = await engine.generate(turn(1, conversation="c", max_tokens=60, stop=()))
        longer = (*PROMPT, *first.tokens, 11, 12)
        second = await engine.generate(turn(2, tokens=longer, conversation="c"))
        await engine.release("c")
        await engine.release("never heard of")
        third = await engine.generate(turn(3, tokens=(12, *longer), conversation="c"))
        return first.cached_tokens, second.cached_tokens, len(longer), third.cached_tokens

    first, second, length, third = serve(scenario)
    assert (first, third) == (0, 0)
    assert len(PROMPT) < second < length if serve.keeps else second == 0


def test_cancelling_the_caller_aborts_and_the_engine_goes_on(serve):
    async def scenario(engine):
        task = asyncio.create_task(engine.generate(turn(2, max_tokens=200, stop=())))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await engine.generate(turn(1))

    assert serve(scenario).tokens


def test_a_stream_is_the_completion_in_pieces(serve, exact):
    async def scenario(engine):
        return [piece async for piece in engine.stream(turn(2))], await engine.generate(turn(2))

    (*deltas, last), whole = serve(scenario)
    assert deltas and same([last], [whole], exact) and last.finish_reason == whole.finish_reason
    assert tuple(token for delta in deltas for token in delta.tokens) == last.tokens
    assert tuple(logprob for delta in deltas for logprob in delta.logprobs) == last.logprobs
    if deltas[0].versions.values:
        whole = joined(deltas)
        told = (whole.versions, whole.kv_versions, whole.kept, whole.top_logprobs, whole.finish_reason)
        assert told == (last.versions, last.kv_versions, last.kept, last.top_logprobs, last.finish_reason)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "top_logprobs": 2}, {"top_k": 4, "min_tokens": 10}])
def test_a_turn_is_whole_wherever_another_request_goes_on(serve, exact, sampling):
    """Another engine of the same weights samples the rest of what one has told."""

    async def scenario(engine):
        pieces = [piece async for piece in engine.stream(asked)]
        if not exact or not pieces[0].versions.values:
            return [pieces[-1]], pieces[-1]
        wholes = []
        for number in range(len(pieces)):
            told = pieces[:number]
            sampled = [token for delta in told for token in delta.tokens]
            if len(sampled) < len(pieces[-1].tokens):
                wholes.append(completed(told, await engine.generate(asked.after(sampled))))
        return wholes, pieces[-1]

    asked = turn(2, max_tokens=40, stop=(STOP,), **sampling)
    wholes, whole = serve(scenario)
    assert wholes and all(replace(one, cached_tokens=0) == replace(whole, cached_tokens=0) for one in wholes)


def test_leaving_a_stream_drops_the_request(serve):
    async def scenario(engine):
        stream = engine.stream(turn(2, max_tokens=3000))
        await anext(stream)
        await stream.aclose()
        return await engine.generate(turn(1))

    assert serve(scenario).tokens


async def aborted(engine, request, *, tries):
    """What was sampled by the time that its first piece had come and the abort arrived. An engine in a process of its
    own may be done before that: then once more."""
    for _ in range(tries):
        async for piece in engine.stream(request):
            if isinstance(piece, Completion):
                break
            await engine.abort(request.id)
        if piece.finish_reason == "abort":
            break
    return piece


@pytest.mark.kernel_paths("best", *COMPILED)
def test_abort_returns_what_was_sampled_and_a_later_request_goes_on(serve, exact):
    async def scenario(engine):
        whole = await engine.generate(turn(2, max_tokens=3000, stop=()))
        await engine.abort("never heard of")
        cut = await aborted(engine, turn(2, max_tokens=3000, stop=()), tries=1 if exact else 8)
        rest = await engine.generate(turn(2, tokens=(*PROMPT, *cut.tokens), max_tokens=3000 - len(cut.tokens), stop=()))
        return whole, cut, rest

    whole, cut, rest = serve(scenario)
    assert cut.finish_reason == "abort"
    assert 0 < len(cut.tokens) == len(cut.logprobs) == len(cut.versions) == len(cut.kv_versions) < 3000
    assert len(cut.tokens) + len(rest.tokens) == len(whole.tokens)
    if exact:
        assert (*cut.tokens, *rest.tokens) == whole.tokens and (*cut.logprobs, *rest.logprobs) == whole.logprobs


def test_abort_reaches_a_caller_that_does_not_stream(serve, exact):
    async def scenario(engine):
        for _ in range(1 if exact else 8):  # as in `aborted`
            task = asyncio.create_task(engine.generate(turn(2, max_tokens=3000, stop=())))
            await asyncio.sleep(0)
            await engine.abort("r2")
            if (answer := await task).finish_reason == "abort":
                break
        return answer

    answer = serve(scenario)
    assert answer.finish_reason == "abort" and len(answer.tokens) < 3000


async def scored(engine):
    answer = await engine.generate(turn(4, temperature=0.8))
    judged = ScoreRequest(id="s", tokens=(*PROMPT, *answer.tokens), first=len(PROMPT), temperature=0.8, top_k=3)
    return answer, await engine.score(judged)


@able_to("score")
def test_scores_are_of_the_distribution_that_was_sampled_from(serve, exact):
    answer, scores = serve(scored)
    assert (
        scores.logprobs == (answer.logprobs if exact else pytest.approx(answer.logprobs, abs=1e-4))
        and scores.version == 4
    )
    assert len(scores.entropies) == len(scores.top_ids) == len(scores.top_logprobs) == len(answer.tokens)
    assert all(
        len(set(ids)) == 3 and list(tops) == sorted(tops, reverse=True)
        for ids, tops in zip(scores.top_ids, scores.top_logprobs, strict=False)
    )


@unable_to("score")
def test_scores_are_refused_by_name(serve, said):
    with pytest.raises(EngineError, match=f"expected {said}"):
        serve(scored)


def test_what_it_says_of_itself_are_numbers_that_grow(serve):
    async def scenario(engine):
        before, answer = dict(engine.metrics), await engine.generate(turn())
        return before, answer, dict(engine.metrics)

    before, answer, after = serve(scenario)
    assert all(isinstance(value, int | float) for value in after.values())
    grown = after.get("generated_tokens", math.inf) - before.get("generated_tokens", 0.0)
    assert grown >= len(answer.tokens)
    assert all(after[name] >= value for name, value in before.items() if not name.endswith("_now"))


def test_a_closed_engine_refuses(serve):
    async def scenario(engine):
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError):
            await engine.generate(turn(1))

    serve(scenario)


@able_to("pull")
def test_a_pulled_version_marks_what_comes_after(serve, model_path):
    from sparring.model.load import load
    from sparring.weights.inline import publish

    ref = publish("policy", 5, load(model_path).state())

    async def scenario(engine):
        before = await engine.generate(turn(1, conversation="c"))
        await engine.pull(ref)
        after = await engine.generate(turn(2, tokens=(*PROMPT, *before.tokens, 11), conversation="c"))
        await engine.pull(replace(ref, version=6))
        return engine.version, after

    version, after = serve(scenario)
    assert version == 6
    assert set(after.versions.expand()) == set(after.kv_versions.expand()) == {5}
    assert after.cached_tokens == 0


@unable_to("pull")
def test_a_pull_is_refused_by_name(serve, model_path, said):
    from sparring.model.load import load
    from sparring.weights.inline import publish

    ref = publish("policy", 5, load(model_path).state())
    with pytest.raises(WeightsError, match=f"expected {said}"):
        serve(lambda engine: engine.pull(ref))


def weights_of(model_path, version):
    from sparring.model.load import load
    from sparring.weights.inline import publish

    return publish("policy", version, load(model_path).state())


@able_to("sleep")
def test_a_conversation_goes_on_after_a_sleep_as_if_there_had_been_none(serve, model_path):
    ref = weights_of(model_path, 4)

    async def scenario(engine):
        first = await engine.generate(turn(2, conversation="c", max_tokens=60, stop=()))
        longer = (*PROMPT, *first.tokens, 11, 12)
        await engine.sleep()
        await engine.sleep()
        await engine.wake(ref)
        await engine.wake(ref)
        after = await engine.generate(turn(6, tokens=longer, conversation="c"))
        return after, engine.version, longer

    async def awake(engine):
        await engine.generate(turn(2, conversation="c", max_tokens=60, stop=()))
        return await engine.generate(turn(6, tokens=longer, conversation="c"))

    after, version, longer = serve(scenario)
    assert version == 4 and after.cached_tokens == 0  # nothing is left of prefixes either
    assert replace(serve(awake), cached_tokens=0) == after


@able_to("sleep")
@pytest.mark.kernel_paths("best", *COMPILED)
def test_requests_wait_for_an_engine_that_sleeps_and_none_is_lost(serve, model_path):
    """One in the middle of its turn, and one that comes meanwhile; another one is aborted, and one leaves."""

    async def scenario(engine):
        whole = await engine.generate(turn(2, max_tokens=2000, stop=()))
        stream = engine.stream(turn(2, max_tokens=2000, stop=()))
        pieces = [await anext(stream)]
        middle = asyncio.create_task(read(stream, pieces))
        await engine.sleep()
        late, leaves = (asyncio.create_task(engine.generate(turn(seed))) for seed in (4, 8))
        told = asyncio.create_task(read(engine.stream(turn(6)), []))
        await asyncio.sleep(0)
        await engine.abort("r6")
        aborted = (await told)[-1]
        leaves.cancel()
        done, _ = await asyncio.wait((middle, late), timeout=0)
        await engine.wake(replace(ref, version=5))
        return whole, await middle, await late, aborted, done, await engine.generate(turn(4))

    async def read(stream, pieces):
        async for piece in stream:
            pieces.append(piece)
        return pieces

    ref = weights_of(model_path, 5)
    whole, pieces, late, aborted, done, again = serve(scenario)
    *told, last = pieces
    assert not done and aborted.finish_reason == "abort" and not aborted.tokens
    assert len(last.tokens) == len(whole.tokens) == 2000
    versions, kv_versions = last.versions.expand(), last.kv_versions.expand()
    assert versions == sorted(versions) and set(versions) == {4, 5} and kv_versions == versions
    assert (late.tokens, late.logprobs) == (again.tokens, again.logprobs) and set(late.versions.expand()) == {5}
    assert last.tokens == whole.tokens
    assert joined(told).tokens == last.tokens and joined(told).versions == last.versions


@able_to("sleep")
def test_an_engine_that_sleeps_takes_weights_to_wake_with_alone(serve, model_path):
    async def scenario(engine):
        await engine.sleep()
        with pytest.raises(WeightsError, match="awake"):
            await engine.pull(ref)
        assert engine.version == 4
        await engine.wake(ref)
        await engine.pull(replace(ref, version=6))
        await engine.sleep()
        await engine.wake(replace(ref, version=6))
        await engine.wake(replace(ref, version=7))  # as an update
        return engine.version, await engine.generate(turn(2))

    ref = weights_of(model_path, 5)
    version, answer = serve(scenario)
    assert version == 7 and set(answer.versions.expand()) == {7}


@able_to("sleep")
def test_an_engine_that_is_closed_in_its_sleep_fails_what_waits(serve):
    async def scenario(engine):
        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(turn(2)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError):
            await waiting
        with pytest.raises(EngineError):
            await engine.sleep()

    serve(scenario)


@unable_to("sleep")
def test_a_sleep_is_refused_by_name(serve, said):
    async def scenario(engine):
        with pytest.raises(EngineError, match=f"expected {said}"):
            await engine.sleep()
        return await engine.generate(turn(1))

    assert serve(scenario).tokens
