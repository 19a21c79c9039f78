"""A weight update happens whole or not at all, and every token says which weights it saw."""

import asyncio
from dataclasses import replace

import pytest
import torch

from sparring.errors import EngineError, WeightsError
from sparring.generation import GenerateRequest, Sampling, ScoreRequest
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model
from sparring.weights.inline import publish

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]

PROBE = (4, 9, 2, 33, 7)
PROMPT = tuple(range(40))


def request(number=0, **settings):
    tokens = settings.pop("tokens", PROMPT)
    conversation = settings.pop("conversation", None)
    sampling = Sampling(**{"max_tokens": 8, "seed": number, **settings})
    return GenerateRequest(id=str(number), tokens=tokens, sampling=sampling, conversation=conversation)


@pytest.fixture
def trained(model_path):
    """The reference of version 1: other weights, with their probe."""
    model = load(model_path)
    with torch.no_grad():
        for name, parameter in model.state().items():
            if "mlp" in name:
                parameter.mul_(1.3)
        model.refresh()
        hidden = model.hidden(torch.tensor(PROBE[:-1]), torch.arange(len(PROBE) - 1), Packed.of([len(PROBE) - 1]))
        targets = torch.tensor(PROBE[1:])
        logprobs = token_quantities(model, hidden, targets, torch.ones(len(targets)), {"logprob"})["logprob"]
    return publish("policy", 1, model.state(), (PROBE, tuple(logprobs.tolist())))


def test_a_pulled_version_is_served(serve, trained, model_path):
    async def scenario(engine):
        before = await engine.generate(request())
        await engine.pull(trained)
        return before, await engine.generate(request()), engine.version

    async def fresh(engine):
        engine.model.load_state(trained.location)
        return await engine.generate(request())

    before, after, version = serve(scenario)
    assert (version, set(before.versions.values), set(after.versions.values)) == (1, {0}, {1})
    assert before.logprobs != after.logprobs
    assert (after.tokens, after.logprobs) == ((expected := serve(fresh)).tokens, expected.logprobs)


def damaged(ref, how):
    state = {name: tensor.clone() for name, tensor in ref.location.items()}
    if how == "checksum":
        state["model.norm.weight"][0] += 1
        return replace(ref, location=state)
    if how == "probe":
        tokens, logprobs = ref.probe
        return replace(ref, probe=(tokens, (*logprobs[:-1], logprobs[-1] + 1e-6)))
    if how == "nan":
        tokens, logprobs = ref.probe
        return replace(ref, probe=(tokens, (*logprobs[:-1], float("nan"))))
    if how == "missing":
        del state["model.norm.weight"]
    if how == "shape":
        state["model.norm.weight"] = torch.ones(3)
    if how == "model":
        return replace(ref, model="critic")
    return publish(ref.model, ref.version, state, ref.probe)


@pytest.mark.parametrize("how", ["checksum", "probe", "nan", "missing", "shape", "model"])
def test_a_bad_update_leaves_the_old_version_serving(serve, trained, how):
    async def scenario(engine):
        before = await engine.generate(request())
        with pytest.raises(WeightsError):
            await engine.pull(damaged(trained, how))
        after = await engine.generate(request())
        version = engine.version
        await engine.pull(trained)
        return before, after, version, engine.version

    before, after, version, healed = serve(scenario)
    assert (version, healed) == (0, 1)
    assert (before.tokens, before.logprobs) == (after.tokens, after.logprobs)


def test_the_engine_shares_no_storage_with_what_it_pulled(serve, trained):
    async def scenario(engine):
        await engine.pull(trained)
        before = await engine.generate(request())
        for tensor in trained.location.values():
            tensor.zero_()
        return before.logprobs, (await engine.generate(request())).logprobs

    before, after = serve(scenario)
    assert before == after


def test_no_cache_survives_an_update(serve, trained):
    async def scenario(engine):
        first = await engine.generate(request(conversation="c"))
        await engine.pull(trained)
        longer = (*PROMPT, *first.tokens, 5)
        return await engine.generate(request(tokens=longer, conversation="c")), longer

    async def fresh(engine):
        await engine.pull(trained)
        return await engine.generate(request(tokens=longer))

    (after, longer) = serve(scenario)
    assert after.cached_tokens == 0
    assert set(after.kv_versions.values) == {1}
    expected = serve(fresh)
    assert (after.tokens, after.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("version", [0, 1])
def test_a_number_that_served_other_weights_is_refused_for_its_kv_is_still_there(serve, trained, model_path, version):
    async def scenario(engine):
        await engine.pull(trained)
        kept = await engine.generate(request(conversation="rollout"))
        with pytest.raises(WeightsError, match=f"expected a version above the served 1, got {version}"):
            await engine.pull(publish("policy", version, load(model_path).state()))
        return kept, await engine.generate(request()), engine.version

    kept, again, served = serve(scenario)
    assert served == 1 and (again.tokens, again.logprobs) == (kept.tokens, kept.logprobs)


def test_a_step_of_generation_that_does_not_give_what_the_model_gives_refuses_the_update(serve, trained):
    async def scenario(engine):
        before = await engine.generate(request())
        # what a step of generation adds and the trainer's forward does not: only serving is wrong
        engine._worker._runner._slots.bias(32, 1 << 60, (), [(token, 1.0) for token in range(5)])
        with pytest.raises(WeightsError, match="expected a generation step to reproduce the model's log-probability"):
            await engine.pull(trained)
        return before, await engine.generate(request()), engine.version

    before, after, version = serve(scenario)
    assert (before.tokens, before.logprobs, version) == (after.tokens, after.logprobs, 0)


@pytest.mark.kernel_paths("best")
def test_where_the_old_weights_are_not_what_they_were_nothing_is_served_until_an_update_is_verified(
    serve, trained, tmp_path
):
    """Version 1 is served; somebody writes in its weights; a bad version 2 is refused, and there is no good one to go
    back to."""
    bad = damaged(replace(trained, version=2), "probe")
    # the same weights with room for replies that no update is too late for
    path = tiny_model("qwen3", tmp_path / "long", tied=True, seed=4, max_position_embeddings=8192)

    async def scenario(engine):
        await engine.pull(trained)
        good = await engine.generate(request(1))
        stream = engine.stream(request(max_tokens=8000, conversation="c"))
        crowd = [asyncio.create_task(engine.generate(request(number, max_tokens=8000))) for number in range(2, 40)]
        await anext(stream)
        engine.model.state()["model.norm.weight"].add_(0.5)
        with pytest.raises(WeightsError, match="restoring the old weights failed too"):
            await engine.pull(bad)
        with pytest.raises(EngineError, match="refuses all requests until an update succeeds"):
            _ = [piece async for piece in stream]
        failed = await asyncio.gather(*crowd, engine.generate(request(1)), return_exceptions=True)
        with pytest.raises(EngineError, match="refuses all requests"):
            await engine.score(ScoreRequest(id="s", tokens=PROBE))
        with pytest.raises(WeightsError, match="expected a probe"):
            await engine.pull(replace(trained, version=3, probe=None))
        with pytest.raises(EngineError, match="refuses all requests"):
            await engine.generate(request(1))
        await engine.pull(trained)
        return good, failed, await engine.generate(request(1)), engine.version, engine.metrics["kv_bytes_now"] == 0

    good, failed, healed, version, free = serve(scenario, path=path)
    assert any(isinstance(answer, EngineError) for answer in failed[:-1]) and isinstance(failed[-1], EngineError)
    assert (healed.tokens, healed.logprobs, version) == (good.tokens, good.logprobs, 1) and free
