"""A GPU's steps on the CPU, without graphs: a step of prompts and replies is two calls with the bits of one, and what a
graph reads stays where it is over updates."""

import asyncio
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from common.tiny_adapters import tiny_adapter

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import WeightsError
from sparring.generation import GenerateRequest, Sampling
from sparring.kernels import ops
from sparring.model.load import load
from sparring.model.lora import Adapter
from sparring.model.peft import read
from sparring.model.staging import held
from sparring.model.steps.device import DeviceStep
from sparring.model.steps.operations import OperationStep
from sparring.model.steps.rows import Slots, StepRows
from sparring.testing.tiny_models import tiny_model
from sparring.weights.inline import publish

PAGE = 16


class Recorded:
    """A step's calls, each as the slots of its rows."""

    def __init__(self, step):
        self.step, self.calls = step, []

    def __call__(self, rows):
        self.calls.append(rows.slots.tolist())
        return self.step(rows)


def rows_of(counts, lengths, entered=(), samples=None):
    """`counts`, `lengths`: new tokens and all of them, by slot."""
    return StepRows(
        slots=array("i", counts),
        cu_rows=array("i", [0, *np.cumsum([*counts.values()]).tolist()]),
        lengths=array("i", [lengths[slot] for slot in counts]),
        tokens=array("q", [(7 * n + 3 * slot) % 80 for slot, count in counts.items() for n in range(count)]),
        samples=array("B", samples or [1] * len(counts)),
        entered=array("B", [slot in entered for slot in counts]),
        steps=1,
        interrupt=array("i", [0]),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With two adapters, 0 and 1."""
    path = tiny_model("qwen3", tmp_path_factory.mktemp("steps") / "model", seed=4)
    model = load(path)
    for number in range(2):
        adapter = Adapter(read(tiny_adapter(path, path.parent / str(number), seed=number)), model.dtype, model.device)
        model.adapters.put(number, model.adapters.fit(adapter))
    return model


@pytest.mark.parametrize("adapters", [(-1,) * 6, (0,) * 6, (-1, 1, 1, 1, 0, 1)])
@torch.inference_mode()
def test_a_step_of_prompts_and_replies_is_two_calls_with_the_bits_of_one(model, adapters):
    """Slot 3 truncates, slot 4 is biased and 5 reads its prompt in two parts; slot 1 then begins again on a page that
    slot 0 fills in the same step."""
    found = []
    for splits in (True, False):
        pages = ops.KvPages(
            model.kv_heads,
            num_pages=12,
            page_size=PAGE,
            dtype=model.dtype,
            device=model.device,
            transposed=ops.transposes_keys(model.device),
        )
        slots = Slots.of(6, 2, model.vocab_size)
        slots.tables[:], slots.seeds[:] = np.arange(12).reshape(6, 2), range(6)
        slots.temperature[:], slots.adapters[:] = [1.0, 0.7, 0.0, 1.0, 1.0, 1.0], adapters
        slots.top_k[3], slots.tops[3] = 5, 2
        slots.bias(4, 0, (3,), ((5, 1.5),))
        others = Recorded(OperationStep(model, pages, slots))
        step = DeviceStep(model, pages, slots, others, batches=(2, 4)) if splits else others
        lengths = {0: PAGE - 1, 1: 3, 2: 9, 3: 4, 4: 5, 5: 6}
        sampled = [step(rows_of(dict(list(lengths.items())[:5]), lengths, entered=range(5)))]
        lengths = {slot: length + (slot < 5) for slot, length in lengths.items()}
        counts = {5: 6, 0: 1, 3: 1, 1: 1, 4: 1, 2: 1}
        sampled.append(step(rows_of(counts, lengths, entered=(5,), samples=[0, 1, 1, 1, 1, 1])))
        slots.tables[1] = [0, 9]
        lengths |= {1: PAGE + 1, 0: PAGE + 1, 2: 11, 5: 8}
        sampled.append(step(rows_of({0: 1, 1: 1, 2: 1, 5: 2}, lengths, entered=(1,))))
        found.append((sampled, [tensor.clone() for tensor in pages.tensors], others.calls))
    (ours, our_pages, calls), (theirs, their_pages, _) = found
    assert ours == theirs
    assert all(map(torch.equal, our_pages, their_pages))
    graphed = {slot for slot in (0, 1, 2) if adapters[slot] == max(adapters[:3], key=adapters[:3].count)}
    assert set(calls[1]) == {5, 3, 4, 0, 1, 2} - graphed
    assert {1, 5} <= set(calls[2]) and len(calls) == 3


def updated(model, factor):
    return {name: tensor * factor if "mlp" in name else tensor.clone() for name, tensor in model.state().items()}


def places(model, adapters=()):
    """Addresses of everything that an engine's graphs read."""
    packed = [factor for one in adapters for term in one.terms.values() for factor in (term.a, term.b)]
    factors = [tensor for one in adapters for tensor in one.parameters().values()]
    biases = [part.bias for part in model.parts if getattr(part, "packed", None) is not None and part.bias is not None]
    tensors = [*held(model), *biases, *factors, *(factor.storage for factor in packed)]
    return [tensor.data_ptr() for tensor in tensors]


class Graphed(DeviceStep):
    """A step that shows its graphs."""

    def graphs(self):
        return dict(self._graphs)


def on_graphs(path):
    """An engine that computes as on a GPU, and its step."""
    engine = NativeEngine(load(path), EngineConfig(), threads=1)
    runner = engine._worker._runner
    runner._compute = step = Graphed(engine.model, runner._pages, runner._slots, runner._operations)
    runner.keeps_tensors = True
    return engine, step


def asked(number):
    return GenerateRequest(id=str(number), tokens=(5, 9, 2, 7), sampling=Sampling(max_tokens=6, seed=3))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_three_updates_leave_every_tensor_of_the_engine_where_it_is(family, tmp_path):
    """Whole, refused by its probe (law 9: the old version goes on), whole; each graph is made once."""
    path = tiny_model(family, tmp_path / "model", seed=4)
    trainer = load(path)
    wrong = ((4, 9, 2, 33, 7), (-1.0,) * 4)

    async def serve():
        engine, step = on_graphs(path)
        answers = [await engine.generate(asked(0))]
        before, graphs = places(engine.model), step.graphs()
        await engine.pull(publish("policy", 1, updated(trainer, 1.3)))
        answers.append(await engine.generate(asked(1)))
        with pytest.raises(WeightsError, match="the old version"):
            await engine.pull(publish("policy", 2, updated(trainer, 0.5), wrong))
        answers.append(await engine.generate(asked(2)))
        last = updated(trainer, 0.7)
        await engine.pull(publish("policy", 2, last))
        answers.append(await engine.generate(asked(3)))
        assert places(engine.model) == before and step.graphs() == graphs and graphs
        assert not {tensor.data_ptr() for tensor in last.values()} & set(before)
        await engine.close()
        return answers

    async def fresh(factor):
        engine = NativeEngine(load(path), EngineConfig(), threads=1)
        if factor != 1.0:
            await engine.pull(publish("policy", 1, updated(trainer, factor)))
        answer = await engine.generate(asked(0))
        await engine.close()
        return answer

    answers = asyncio.run(serve())
    expected = [asyncio.run(fresh(factor)) for factor in (1.0, 1.3, 1.3, 0.7)]
    assert [(one.tokens, one.logprobs) for one in answers] == [(one.tokens, one.logprobs) for one in expected]
    assert [set(one.versions.values) for one in answers] == [{0}, {1}, {1}, {2}]


def test_updates_of_an_adapter_leave_its_tensors_where_they_are(tmp_path):
    """As of a LoRA run: its adapter, the adapter again, one that its probe refuses; then one of another scale, which
    has tensors of its own."""
    path = tiny_model("qwen3", tmp_path / "model", seed=4)
    states = [read(tiny_adapter(path, tmp_path / str(seed), seed=seed)) for seed in range(3)]
    wrong = ((4, 9, 2, 33, 7), (-1.0,) * 4)

    async def serve():
        engine, step = on_graphs(path)
        adapters = engine.model.adapters.by_number
        await engine.pull(publish("policy", 1, states[0], adapter="policy"))
        answers = [await engine.generate(asked(0))]
        before, graphs = places(engine.model, adapters.values()), step.graphs()
        await engine.pull(publish("policy", 2, states[1], adapter="policy"))
        answers.append(await engine.generate(asked(1)))
        with pytest.raises(WeightsError, match="the old version"):
            await engine.pull(publish("policy", 3, states[2], wrong, adapter="policy"))
        answers.append(await engine.generate(asked(2)))
        assert places(engine.model, adapters.values()) == before
        assert step.graphs() == graphs and [key[1] for key in graphs] == list(adapters.values())
        other = {**states[2], "lora_scale": states[2]["lora_scale"] * 2}
        await engine.pull(publish("policy", 3, other, adapter="policy"))
        answers.append(await engine.generate(asked(3)))
        assert not step.graphs().keys() & graphs.keys()
        await engine.close()
        return answers, other

    async def fresh(state):
        engine = NativeEngine(load(path), EngineConfig(), threads=1)
        await engine.pull(publish("policy", 1, state, adapter="policy"))
        answer = await engine.generate(replace(asked(0)))
        await engine.close()
        return answer

    answers, other = asyncio.run(serve())
    expected = [asyncio.run(fresh(state)) for state in (states[0], states[1], states[1], other)]
    assert [(one.tokens, one.logprobs) for one in answers] == [(one.tokens, one.logprobs) for one in expected]
