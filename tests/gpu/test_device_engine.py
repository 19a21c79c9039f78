"""Law 3 on the device path: what the engine samples with is, to the bit, what the trainer's packed forward finds."""

import asyncio
from array import array
from dataclasses import replace
from itertools import chain

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from tables import with_settings

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import WeightsError
from sparring.generation import GenerateRequest, Sampling
from sparring.kernels import ops
from sparring.kernels.device.path import is_interpreted
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.model.peft import read
from sparring.model.steps.device import DeviceStep
from sparring.model.steps.operations import OperationStep
from sparring.model.steps.rows import Slots, StepRows
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish

# numpy warns of the infinite and undefined numbers of padding rows, which a device computes in silence
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

INTERPRETED = is_interpreted()

OTHERS = [
    "llama",
    "qwen2",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "glm4",
    "olmo2",
    "gpt_oss",
]
MODELS = [("qwen3", "bfloat16")]
MODELS += [] if INTERPRETED else [("qwen3", "float32"), *((family, "bfloat16") for family in OTHERS)]
RECURRENT = ["nemotron_h"] if INTERPRETED else ["nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
LENGTHS = [3, 17, 20] if INTERPRETED else [3, 16, 17, 40, 1, 33, 9, 200]


def requests():
    return [
        GenerateRequest(
            id=str(i),
            tokens=tuple((7 * i + 3 * j) % VOCABULARY for j in range(length)),
            sampling=Sampling(max_tokens=4 + 3 * (i % 3), seed=i, temperature=(1.0, 0.7)[i % 2]),
        )
        for i, length in enumerate(LENGTHS)
    ]


def served(model, wanted, adapters=None, **settings):
    """`adapters`: folders by name."""

    async def serve():
        engine = NativeEngine(model, with_settings(EngineConfig(), **settings), threads=1)
        for name, folder in (adapters or {}).items():
            await engine.pull(publish("policy", 1, read(folder), adapter=name))
        answers = await asyncio.gather(*(engine.generate(request) for request in wanted))
        await engine.close()
        return answers

    return asyncio.run(serve())


def test_an_update_reaches_graphs_that_were_captured_before(device, tmp_path):
    """The update's probe has several rows of one sequence, which no graph computes."""
    first, second = (tiny_model("qwen3", tmp_path / str(seed), seed=seed) for seed in (3, 4))
    wanted = requests()

    async def serve():
        engine = NativeEngine(load(first, dtype="bfloat16", device=device), EngineConfig(), threads=1)
        await asyncio.gather(*(engine.generate(request) for request in wanted))
        await engine.pull(publish("policy", 1, load(second, dtype="bfloat16", device=device).state()))
        again = [replace(request, id=f"{request.id}/again") for request in wanted]
        answers = await asyncio.gather(*(engine.generate(request) for request in again))
        await engine.close()
        return answers

    answers = asyncio.run(serve())
    trainer = load(second, dtype="bfloat16", device=device)
    assert trained(trainer, wanted, answers) == [list(answer.logprobs) for answer in answers]


@pytest.mark.parametrize("name", [None, "policy"], ids=["whole", "adapter"])
def test_a_graph_is_captured_once_over_three_updates(device, name, tmp_path):
    """The second is refused by its probe; the tokens are those of an engine that has had no other weights."""
    path = tiny_model("qwen2", tmp_path / "model", seed=3)
    others = [tiny_model("qwen2", tmp_path / str(seed), seed=seed) for seed in range(3)]
    folders = others if name is None else [tiny_adapter(path, tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    states = [load(one, dtype="bfloat16").state() if name is None else read(one) for one in folders]
    wanted = requests()

    async def serve(versions, *, wrong=None):
        engine = NativeEngine(load(path, dtype="bfloat16", device=device), EngineConfig(), threads=1)
        answers, graphs = [], []
        for version, state in versions:
            if version == wrong:
                with pytest.raises(WeightsError, match="the old version"):
                    await engine.pull(publish("policy", version, state, ((4, 9, 2), (-1.0, -1.0)), adapter=name))
            else:
                await engine.pull(publish("policy", version, state, adapter=name))
            again = [replace(request, id=f"{request.id}/{version}") for request in wanted]
            answers.append([(a.tokens, a.logprobs) for a in await asyncio.gather(*map(engine.generate, again))])
            graphs.append(dict(engine._worker._runner._compute._graphs))
        await engine.close()
        return answers, graphs

    answers, graphs = asyncio.run(serve(list(enumerate(states, 1)), wrong=2))
    assert graphs[0] and graphs[1].items() >= graphs[0].items() and graphs[2].items() >= graphs[1].items()
    assert answers[1] == answers[0]
    for place in (0, 2):
        assert answers[place] == asyncio.run(serve([(1, states[place])]))[0][0]


def test_conversations_come_back_from_host_memory_to_the_bit(device, tmp_path):
    """Two at a time have room for their pages; each of four speaks twice."""
    model = load(tiny_model("qwen3", tmp_path / "model", seed=3), dtype="bfloat16", device=device)
    first = [replace(request, conversation=request.id) for request in requests()[:3]]

    async def speak(engine):
        answers = [await engine.generate(request) for request in first]
        again = [
            replace(request, id=f"{request.id}/again", tokens=(*request.tokens, *answer.tokens, 5))
            for request, answer in zip(first, answers, strict=True)
        ]
        answers += [await engine.generate(request) for request in again]
        metrics = engine.metrics
        await engine.close()
        return [(answer.tokens, answer.logprobs) for answer in answers], metrics

    kept = {"kv_tokens": 48, "share_prefixes": False, "max_running": 1}
    found = [
        asyncio.run(
            speak(NativeEngine(model, with_settings(EngineConfig(), **kept, kv_across_turns=policy), threads=1))
        )
        for policy in ("offload", "drop")
    ]
    assert found[0][0] == found[1][0]
    assert found[0][1]["kv_restored_tokens"] > 0 and found[1][1]["kv_restored_tokens"] == 0


def trained(model, wanted, answers):
    """Log-probabilities of the answers in one packed forward with gradients on; the backward pass runs too."""
    rows = [(*request.tokens, *answer.tokens) for request, answer in zip(wanted, answers, strict=True)]
    device = model.device
    tokens = torch.tensor([token for row in rows for token in row], device=device)
    positions = torch.cat([torch.arange(len(row)) for row in rows]).to(device)
    begins = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    pairs = list(zip(begins, wanted, answers, strict=False))
    predicting = [
        torch.arange(len(answer.tokens)) + begin + len(request.tokens) - 1 for begin, request, answer in pairs
    ]
    heat = [torch.full((len(answer.tokens),), request.sampling.temperature) for _, request, answer in pairs]
    places = torch.cat(predicting).to(device)
    hidden = model.hidden(tokens, positions, Packed.of([len(row) for row in rows]).to(device))
    quantities = token_quantities(model, hidden[places], tokens[places + 1], torch.cat(heat).to(device), {"logprob"})
    quantities["logprob"].sum().backward()
    gradients = [parameter.grad for parameter in model.module.parameters() if parameter.grad is not None]
    assert gradients and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return [part.tolist() for part in quantities["logprob"].detach().split([len(answer.tokens) for answer in answers])]


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_engine_equals_packed_training_forward(device, family, dtype, tmp_path):
    path, wanted = tiny_model(family, tmp_path / "model", seed=3), requests()
    model = load(path, dtype=dtype, device=device)
    answers = served(model, wanted, max_running=2, max_tokens=24)
    trainer = load(path, dtype=dtype, device=device)
    assert trained(trainer, wanted, answers) == [list(answer.logprobs) for answer in answers]
    assert trained(trainer, wanted[1:2], answers[1:2]) == [list(answers[1].logprobs)]


@pytest.mark.parametrize("family", ["qwen3_moe"] if INTERPRETED else ["qwen3", "qwen3_moe", "gpt_oss"])
def test_adapters_of_a_crowd_equal_their_trainers(device, family, tmp_path):
    """Of layers, and of experts where there are any; beside a request without one."""
    path = tiny_model(family, tmp_path / "model", seed=3)
    stacks = () if family == "qwen3" else ("experts.gate_up_proj", "experts.down_proj")
    adapters = {
        name: tiny_adapter(path, tmp_path / name, seed=len(name), target_parameters=stacks) for name in ("a", "other")
    }
    places = {None: path, **adapters}
    names = ([*places] * len(LENGTHS))[: len(LENGTHS)]
    wanted = [replace(request, adapter=name) for request, name in zip(requests(), names, strict=True)]
    answers = served(load(path, dtype="bfloat16", device=device), wanted, adapters, max_running=3)
    for name, place in places.items():
        its = [(r, a) for r, a in zip(wanted, answers, strict=True) if r.adapter == name]
        trainer = load(place, dtype="bfloat16", device=device)
        assert trained(trainer, *zip(*its, strict=True)) == [list(answer.logprobs) for _, answer in its]


def test_gradients_have_the_same_bits_each_time(device, tmp_path):
    """Eight replies share the last row of their prompt, whose gradient is a sum of theirs."""
    model = load(tiny_model("qwen3", tmp_path / "model", seed=3), dtype="bfloat16", device=device)
    prompt, count = 40, 8
    tokens = torch.arange(prompt + count, device=device) % VOCABULARY
    positions = torch.tensor([*range(prompt), *[prompt] * count], device=device)
    shared = torch.tensor([0, *[prompt] * (count - 1)], dtype=torch.int32)
    tree = Packed(Packed.of([prompt + 1, *[1] * (count - 1)]).cu_seqlens, shared).to(device)
    rows = torch.full((count,), prompt - 1, device=device)
    found = []
    for _ in range(2 if INTERPRETED else 20):
        hidden = model.hidden(tokens, positions, tree, rows=rows)
        heat = torch.ones(count, device=device)
        quantities = token_quantities(model, hidden, tokens[prompt:], heat, {"logprob"})
        model.module.zero_grad()
        (quantities["logprob"] * torch.linspace(-1.0, 1.3, count, device=device)).sum().backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.module.named_parameters()})
    for other in found[1:]:
        assert all(torch.equal(gradient, found[0][name]) for name, gradient in other.items())


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_go_on_from_their_state(device, family, tmp_path):
    """To load such a model is to prove it on its device; the engine is then as close to the trainer as rounding lets it
    be."""
    path, wanted = tiny_model(family, tmp_path / "model", seed=3), requests()
    model = load(path, numerics="fast", device=device)
    answers = served(model, wanted, max_running=2, max_tokens=24)
    for found, answer in zip(trained(model, wanted, answers), answers, strict=True):
        assert found == pytest.approx(list(answer.logprobs), abs=1e-3)


def test_a_graph_gives_the_bits_of_single_operations(device, tmp_path):
    """Three sequences in a graph for four, three steps in one call, against one operation after another."""
    model = load(tiny_model("qwen2", tmp_path / "model", seed=4), dtype="bfloat16", device=device)
    found = []
    for graph in (True, False):
        where = {"dtype": model.dtype, "device": device, "transposed": False}
        pages = ops.KvPages(model.kv_heads, num_pages=8, page_size=16, **where)
        slots = Slots.of(4, 2, model.vocab_size)
        slots.tables[:] = [[0, 1], [2, 3], [4, 5], [6, 7]]
        slots.seeds[:], slots.temperature[:] = range(4), [1.0, 0.7, 0.0, 1.0]
        operations = OperationStep(model, pages, slots)
        step = DeviceStep(model, pages, slots, operations, batches=(4,)) if graph else operations
        tokens, given = [5, 6, 7], []
        for length, steps in ((1, 3), (4, 1)):
            for done in range(1 if graph else steps):
                at = length + done
                rows = StepRows(
                    slots=array("i", [3, 0, 2]),
                    cu_rows=array("i", range(4)),
                    lengths=array("i", [at] * 3),
                    tokens=array("q", tokens),
                    samples=array("B", [1] * 3),
                    entered=array("B", [0] * 3),
                    steps=steps if graph else 1,
                    interrupt=array("i", [0]),
                )
                sampled = step(rows)
                given.append((sampled.tokens, sampled.logprobs))
                tokens = [row[-1] for row in sampled.tokens]
        found.append(
            [[[*chain.from_iterable(part[kind][row] for part in given)] for row in range(3)] for kind in (0, 1)]
        )
    assert found[0] == found[1]
    assert len(found[0][0][0]) == 4


def test_a_call_ends_with_the_first_stop():
    from sparring.model.steps.device import _until_stop

    tokens, stops = torch.tensor([[4, 5, 6], [7, 8, 9]]).numpy(), torch.full((2, 8), -1).numpy()
    assert _until_stop(tokens, stops) == 3
    stops[1, 3] = 8
    assert _until_stop(tokens, stops) == 2
    stops[0, 0] = 4
    assert _until_stop(tokens, stops) == 1
