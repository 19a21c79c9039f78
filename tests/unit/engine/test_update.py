"""A weight update happens whole or not at all, and every token says which weights it saw."""

import asyncio
from dataclasses import replace

import pytest
import torch

from sparring.errors import WeightsError
from sparring.generation import GenerateRequest, Sampling
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.weights.inline import publish

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
        engine._model.load_state(trained.location)
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


def test_a_request_in_flight_goes_on_and_records_both_versions(serve, trained):
    async def scenario(engine):
        stream = engine.stream(request(max_tokens=200, stop=(), conversation="c"))
        # a crowd makes its steps long: alone it might be done before the update comes
        crowd = [asyncio.create_task(engine.generate(request(number, tokens=(number, 1), max_tokens=200, stop=()))) for number in range(1, 32)]
        await anext(stream)
        await engine.pull(trained)
        *_, answer = [piece async for piece in stream]
        await asyncio.gather(*crowd)
        again = await engine.generate(request(tokens=(*PROMPT, *answer.tokens, 5), conversation="c"))
        return answer, again

    answer, again = serve(scenario)
    assert answer.versions.values == (0, 1)
    assert sum(answer.versions.lengths) == 200
    assert answer.kv_versions.values == (0,)
    assert again.cached_tokens == 0


@pytest.mark.parametrize("version", [0, 1])
def test_a_number_that_served_other_weights_is_refused_for_its_kv_is_still_there(serve, trained, model_path, version):
    async def scenario(engine):
        await engine.pull(trained)
        kept = await engine.generate(request(conversation="rollout"))
        with pytest.raises(WeightsError, match=f"expected a version after 1, which is served, got {version}"):
            await engine.pull(publish("policy", version, load(model_path).state()))
        return kept, await engine.generate(request()), engine.version

    kept, again, served = serve(scenario)
    assert served == 1 and (again.tokens, again.logprobs) == (kept.tokens, kept.logprobs)
