"""Every family that we claim, on tiny random models: as close to float64 as the library, and one set of bits in both
uses. The short suite has six, which hold every mechanism of attention, norms and experts between them.

Logits of the engine's kind of forward (keys in pages, prompts in pieces) against the untouched library in float64; the
same against the trainer's kind of forward. What is special about a family must matter here: without it the comparison
fails.
"""

import asyncio

import pytest
import torch
from suite import short_of
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoConfig
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.kernels import ops
from sparring.model.attention import Packed, Paged
from sparring.model.experts import RowRouter
from sparring.model.head import token_quantities
from sparring.model.library import class_of
from sparring.model.load import DTYPES, load
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]

LENGTHS = (70, 5, 100, 33)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NO_WINDOW = {"layer_types": ["full_attention", "full_attention"]}
ALIKE = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
FAMILIES = {
    "llama": {"rope_parameters": SCALED_ROPE},
    "qwen2": {},
    "qwen3": {},
    "qwen3 with windows": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "mistral": {},
    "phi3": {},
    "olmo2": {},
    "glm4": {},
    "gemma2": {"tied": True},
    "gemma3_text": {"tied": True},
    "gemma4_text": {"tied": True},
    "gemma4_text with experts": {
        **ALIKE,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "mimo_v2_flash": {},
    "gemma4": {"tied": True},
    "qwen3_vl": {},
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "gpt2": {},
    "gpt_neox": {},
    "starcoder2": {"use_bias": True},
    "stablelm": {},
    "nemotron": {},
    "phi": {},
    "granite": {},
    "cohere2": {},
    "qwen2_moe": {},
    "glm4_moe": {},
    "deepseek_v3": {},
    "deepseek_v2": {},
}
WITHOUT = {
    "llama: scaled rope": {"rope_parameters": PLAIN_ROPE},
    "qwen2: biases": {"weights": ("bias", 0.0)},
    "qwen3: norms of heads": {"weights": ("self_attn.q_norm", 1.0)},
    "qwen3 with windows: window": NO_WINDOW,
    "mistral: window": {"sliding_window": None},
    "phi3: window": {"sliding_window": None},
    "olmo2: norms of queries and keys": {"weights": ("self_attn.k_norm", 1.0)},
    "glm4: biases": {"weights": ("bias", 0.0)},
    "glm4: norms behind the MLP": {"weights": ("post_mlp_layernorm", 1.0)},
    "gemma2: window": NO_WINDOW,
    "gemma2: cap on scores": {"attn_logit_softcapping": None},
    "gemma2: cap on logits": {"final_logit_softcapping": None},
    "gemma2: scale of queries": {"query_pre_attn_scalar": 20},
    "gemma3_text: window": NO_WINDOW,
    "gemma3_text: cap on logits": {"final_logit_softcapping": None},
    "gemma3_text: a rope for each kind of layer": {
        "rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": PLAIN_ROPE},
    },
    "gemma4_text: window": {"sliding_window": 200},
    "gemma4_text: cap on logits": {"final_logit_softcapping": None},
    "gemma4_text: inputs of layers": {"weights": ("per_layer_projection.weight", 0.0)},
    "gemma4_text with experts: experts": {"weights": ("experts.down_proj", 0.0)},
    "gemma4_text with experts: scales of experts": {"weights": ("per_expert_scale", 1.0)},
    "mimo_v2_flash: window": {"sliding_window": 200},
    "mimo_v2_flash: sinks": {"weights": ("sinks", -1e9)},
    "mimo_v2_flash: scale of values": {"attention_value_scale": 1.0},
    "gemma4: window": {"sliding_window": 200},
    "qwen3_vl: norms of heads": {"weights": ("self_attn.q_norm", 1.0)},
    "mixtral: window": {"sliding_window": None},
    "mixtral: second expert": {"num_experts_per_tok": 1},
    "qwen3_moe: second expert": {"num_experts_per_tok": 1},
    "qwen3_moe: renormalised shares": {"norm_topk_prob": False},
    "granite: scale of logits": {"logits_scaling": 1.0},
    "cohere2: scale of logits": {"logit_scale": 1.0},
    "stablelm: biases": {"weights": ("proj.bias", 0.0)},
    "nemotron: biases of norms": {"weights": ("norm.bias", 0.0)},
    "qwen2_moe: shared expert": {"weights": ("shared_expert.down_proj", 0.0)},
    "glm4_moe: shared experts": {"weights": ("shared_experts.down_proj", 0.0)},
    "glm4_moe: scale of shares": {"routed_scaling_factor": 1.0},
    "glm4_moe: groups of experts": {"topk_group": 2},
    "deepseek_v3: latent queries": {"weights": ("q_b_proj", 0.0)},
    "deepseek_v3: scale of shares": {"routed_scaling_factor": 1.0},
    "deepseek_v2: latent queries": {"weights": ("q_b_proj", 0.0)},
    "deepseek_v2: shared experts": {"weights": ("shared_experts.down_proj", 0.0)},
    "gpt_oss: window": NO_WINDOW,
    "gpt_oss: sinks": {"weights": ("sinks", -1e9)},
    "gpt_oss: biases": {"weights": ("bias", 0.0)},
    "gpt_oss: biases of experts": {"weights": ("down_proj_bias", 0.0)},
    "gpt_oss: scaled rope": {"rope_parameters": PLAIN_ROPE},
    "gpt_oss: limit of gates": {"swiglu_limit": 1e9},
    "gpt_oss: second expert": {"num_experts_per_tok": 1},
}
SHORT = ("qwen3", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "deepseek_v3")
families = pytest.mark.parametrize(
    ("family", "dtype"),
    short_of(
        [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")],
        [*((family, "float32") for family in SHORT), ("gpt_oss", "bfloat16")],
    ),
)
SHORT_WITHOUT = (
    "qwen3: norms of heads",
    "gemma2: cap on scores",
    "gemma4_text: inputs of layers",
    "gpt_oss: sinks",
    "deepseek_v3: latent queries",
)


class Wide(TorchFunctionMode):
    """What the library computes in float32 whatever its weights are, it computes in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **wide)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Folder of a family's model; made once."""
    folder = tmp_path_factory.mktemp("families")

    def find(family):
        if not (folder / family).exists():
            tiny_model(family.split()[0], folder / family, seed=7, **FAMILIES[family])
        return folder / family

    return find


def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def library(path, dtype="float32", *, wide=False, weights=("", 0.0), attention="eager", **changed):
    """The library's own logits, row by row; `wide`: in float64 from the weights of that dtype.

    With fields of the config changed, or all weights of some name one value.
    """
    config = AutoConfig.from_pretrained(path)
    for name, value in changed.items():
        setattr(config.get_text_config(), name, value)
    implementations = {"attn_implementation": attention, "experts_implementation": "eager"}
    module = class_of(config).from_pretrained(path, config=config, dtype=DTYPES[dtype], **implementations)
    touched = [
        parameter.fill_(weights[1])
        for name, parameter in module.named_parameters()
        if weights[0] and weights[0] in name
    ]
    assert bool(touched) == bool(weights[0])
    if not wide:
        return torch.cat([module(input_ids=row[None]).logits[0] for row in rows()])
    with Wide():
        return torch.cat([module.double()(input_ids=row[None]).logits[0] for row in rows()])


def packed(model):
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return model.logits(model.hidden(torch.cat(rows()), positions, Packed.of(list(LENGTHS))))


@torch.no_grad()
def paged(model, *, chunk, page_size):
    """All sequences side by side, up to `chunk` tokens of each in a call, over pages that lie in no order."""
    per_sequence = -(-max(LENGTHS) // page_size)
    assert per_sequence >= 4
    pages = ops.KvPages(model.kv_heads, num_pages=per_sequence * len(LENGTHS), page_size=page_size, dtype=model.dtype)
    order = torch.randperm(per_sequence * len(LENGTHS), generator=torch.Generator().manual_seed(1))
    tables, out = order.view(len(LENGTHS), -1).to(torch.int32), [[] for _ in LENGTHS]
    for begin in range(0, max(LENGTHS), chunk):
        pieces = [row[begin : begin + chunk] for row in rows()]
        counts = torch.tensor([len(piece) for piece in pieces], dtype=torch.int32)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        ends = torch.tensor([min(length, begin + chunk) for length in LENGTHS], dtype=torch.int32)
        positions = torch.cat([torch.arange(begin, begin + len(piece)) for piece in pieces])
        where = Paged(pages, ops.PagedRows(tables, offsets, ends))
        logits = model.logits(model.hidden(torch.cat(pieces), positions, where))
        for one, piece in zip(out, logits.split(counts.tolist()), strict=True):
            one.append(piece)
    return torch.cat([torch.cat(one) for one in out])


def error(found, exact):
    return float((found.detach().double() - exact).square().mean().sqrt())


def typical_error(found, exact):
    """That of the median row. A row near the border between two experts may take the other one, in ours or in
    theirs."""
    return float((found.detach().double() - exact).square().mean(-1).sqrt().median())


@families
def test_engine_logits_are_as_close_to_float64_as_the_librarys(family, dtype, path_of):
    path, of_rows = path_of(family), {"float32": error, "bfloat16": typical_error}[dtype]
    exact = library(path, dtype, wide=True)
    assert exact.dtype is torch.float64
    found = paged(load(path, dtype=dtype), chunk=40, page_size=16)
    assert of_rows(found, exact) <= 2 * of_rows(library(path, dtype), exact)


@pytest.mark.parametrize("case", short_of(WITHOUT, SHORT_WITHOUT))
def test_a_model_without_its_trait_differs(case, path_of):
    """The comparison above would not pass if we left this out."""
    path = path_of(case.split(":")[0])
    bound = 2 * error(library(path), library(path, wide=True))
    assert error(paged(load(path), chunk=40, page_size=16), library(path, wide=True, **WITHOUT[case])) > 100 * bound


@families
def test_pages_pieces_and_threads_change_no_bit(family, dtype, path_of):
    model, threads = load(path_of(family), dtype=dtype), torch.get_num_threads()
    expected = packed(model).detach()
    for count, chunk, page_size in ((1, 1, 16), (2, 23, 32), (3, 100, 16)):
        torch.set_num_threads(count)
        found = paged(model, chunk=chunk, page_size=page_size)
        torch.set_num_threads(threads)
        assert torch.equal(found, expected), f"{count} threads, {chunk} tokens a piece"


SUMMED_BY_THE_LIBRARY = ("gpt2", "cohere2", "deepseek_v3", "gemma4_text")
"""With layer norms, with weights and keys that are multiplied with or copied to many rows."""


def gradients_do_not_depend_on_threads(path, dtype):
    model, threads, copies = load(path, dtype=dtype), torch.get_num_threads(), 5
    tokens, lengths = torch.cat(rows() * copies), list(LENGTHS) * copies
    hidden = model.hidden(tokens, torch.cat([torch.arange(length) for length in lengths]), Packed.of(lengths))
    slope = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(hidden.dtype)
    parameters = {name: parameter for name, parameter in model.parameters().items() if parameter.requires_grad}
    names, trained, expected = list(parameters), list(parameters.values()), None
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        found = torch.autograd.grad(hidden, trained, slope, retain_graph=True, allow_unused=True)
        torch.set_num_threads(threads)
        expected = expected or found
        for name, a, b in zip(names, found, expected, strict=True):
            assert a is b is None or torch.equal(a, b), f"{name}: {count} threads"


@pytest.mark.parametrize("family", short_of(SUMMED_BY_THE_LIBRARY, ("gpt2", "deepseek_v3")))
def test_gradients_do_not_depend_on_the_number_of_threads(family, path_of):
    gradients_do_not_depend_on_threads(path_of(family), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SUMMED_BY_THE_LIBRARY])
def test_gradients_of_no_family_depend_on_threads(family, path_of):
    gradients_do_not_depend_on_threads(path_of(family), "bfloat16")


@families
def test_the_engine_samples_with_the_trainers_probabilities(family, dtype, path_of):
    requests = [
        GenerateRequest(
            id=str(i),
            tokens=tuple(row.tolist()),
            sampling=Sampling(max_tokens=9 + 20 * i, seed=i, temperature=(1.0, 0.7)[i % 2]),
        )
        for i, row in enumerate(rows())
    ]

    async def serve():
        engine = NativeEngine(
            load(path_of(family), dtype=dtype), EngineConfig(batch=BatchConfig(max_running=3, max_tokens=48)), threads=1
        )
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        return answers

    answers = asyncio.run(serve())
    trainer = load(path_of(family), dtype=dtype, gradient_checkpointing=True)
    whole = [torch.tensor((*request.tokens, *answer.tokens)) for request, answer in zip(requests, answers, strict=True)]
    positions = torch.cat([torch.arange(len(row)) for row in whole])
    hidden = trainer.hidden(torch.cat(whole), positions, Packed.of([len(row) for row in whole])).split(
        [len(row) for row in whole]
    )
    for request, answer, row, states in zip(requests, answers, whole, hidden, strict=True):
        begin = len(request.tokens)
        heat = torch.full((len(answer.tokens),), request.sampling.temperature)
        found = token_quantities(trainer, states[begin - 1 : -1], row[begin:], heat, {"logprob"})["logprob"]
        found.sum().backward(retain_graph=True)
        assert found.tolist() == list(answer.logprobs)


def test_caps_bend_a_tenth_of_what_they_cap(path_of):
    """At half the cap, tanh takes off 8 %."""
    recorded = []

    def recording(module, query, key, *others, **options):
        scores = query @ key.repeat_interleave(module.num_key_value_groups, 1).transpose(2, 3) * options["scaling"]
        reached = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
        recorded.append(scores[..., reached].abs().flatten() / options["softcap"])
        return eager_attention_forward(module, query, key, *others, **options)

    AttentionInterface.register("recording", recording)
    library(path_of("gemma2"), attention="recording")
    assert (torch.cat(recorded) > 0.5).double().mean() >= 0.1
    for family in ("gemma2", "gemma3_text"):
        cap = AutoConfig.from_pretrained(path_of(family)).final_logit_softcapping
        logits = library(path_of(family), final_logit_softcapping=None)
        assert ((logits.abs() > cap / 2).double().mean()) >= 0.1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_are_unevenly_loaded(family, path_of):
    model = load(path_of(family))
    loads = []

    def count(router, _inputs, outputs):
        loads.append(torch.bincount(outputs[2].flatten(), minlength=router.out_features))

    routers = [part for part in model.module.modules() if isinstance(part, RowRouter)]
    for router in routers:
        router.register_forward_hook(count)
    packed(model)
    assert len(loads) == len(routers) > 0
    assert all(load.max() >= 2 * load.min() for load in loads)


def test_windows_are_shorter_than_the_sequences(path_of):
    for family in (
        "qwen3 with windows",
        "mistral",
        "phi3",
        "gemma2",
        "gemma3_text",
        "gemma4",
        "mimo_v2_flash",
        "mixtral",
        "gpt_oss",
    ):
        assert AutoConfig.from_pretrained(path_of(family)).get_text_config().sliding_window < min(
            length for length in LENGTHS if length > 5
        )
