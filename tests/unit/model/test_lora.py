"""Adapters beside a model's linear layers: what they compute, what they leave alone, what is refused."""

import json

import numpy as np
import pytest
import torch
from common.tiny_adapters import tiny_adapter
from refusals import refused_at
from safetensors.torch import load_file, save_file
from suite import short_of

from sparring.errors import BadInput
from sparring.kernels import ops
from sparring.kernels.compiled.library import COMPILED
from sparring.model.attention import Packed
from sparring.model.config import LoraConfig
from sparring.model.experts import RowExperts
from sparring.model.load import load
from sparring.model.lora import SCALE, Adapter, fresh_state
from sparring.model.peft import CONFIG, TENSORS, read, read_config, write
from sparring.model.targets import targeted, targets_of
from sparring.stages.export import export_folder
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]

MIXTURES = ["qwen3_moe", "mixtral", "gpt_oss"]
FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "gemma2", *MIXTURES]
SHORT = ["qwen3", "gemma2", "gpt_oss"]
"""Of the short suite: a joined decoder, layers of the library's own, experts."""
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
TOKENS = torch.arange(40) % VOCABULARY

numerics_of_experts = pytest.mark.parametrize(
    "numerics", ["exact", pytest.param("fast", marks=pytest.mark.kernel_paths(*COMPILED))]
)
"""Elsewhere fast numerics leave experts to the library, and adapters of them are refused: see below."""


@pytest.fixture(scope="module", params=short_of(FAMILIES, SHORT))
def base(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp("base") / request.param, seed=4)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("base") / "qwen3", seed=4)


def stacks(base):
    """What `target_parameters` name all experts of it, where it has any."""
    return EXPERTS if base.name in MIXTURES else ()


def adapter_of(base, out, **settings):
    """One for all its linear layers and all experts."""
    return tiny_adapter(base, out, target_parameters=stacks(base), **settings)


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model.logits(model.hidden(tokens, torch.arange(len(tokens)), Packed.of([len(tokens)])))


@numerics_of_experts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_untrained_adapter_is_the_model_to_the_bit(base, dtype, numerics):
    model = load(base, dtype=dtype, numerics=numerics)
    plain = logits(model)
    state = fresh_state(model.module, targeted(model.module, "all-linear", stacks(base)), 4, 2.0, seed=0)
    adapter = model.adapters.everywhere = model.adapters.fit(Adapter(state, model.dtype, model.device))
    assert torch.equal(logits(model), plain)
    with torch.no_grad():  # the control: one step of B away from zero it is another
        for name, parameter in adapter.parameters().items():
            parameter.add_(1e-2 if name.endswith("lora_B.weight") else 0.0)
    adapter.refresh()
    assert not torch.equal(logits(model), plain)


@numerics_of_experts
def test_an_adapter_computes_the_same_as_its_merge(base, tmp_path, numerics):
    model = load(adapter_of(base, tmp_path), numerics=numerics)
    merged = load(base, numerics=numerics)
    plain = logits(merged)
    merged.load_state(model.adapters.everywhere.merged(merged.state(), targets_of(merged.module)))
    expected = logits(merged)
    assert (logits(model) - expected).abs().max() < 1e-4 < 1.0 < (plain - expected).abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_see_its_neighbours_adapters(base, tmp_path, dtype):
    """Sequences under three adapters and none, in many mixtures, against each alone under its own everywhere."""
    model = load(base, dtype=dtype)
    folders = [
        adapter_of(base, tmp_path / "0"),
        tiny_adapter(base, tmp_path / "1", seed=1),
        adapter_of(base, tmp_path / "2", seed=2),
    ]
    adapters = [Adapter(read(folder), model.dtype, model.device) for folder in folders]
    for number, adapter in enumerate(adapters):
        model.adapters.put(number, model.adapters.fit(adapter))
    rows = [(TOKENS + 3 * n)[: 3 + 5 * n % 17] for n in range(12)]
    draw = np.random.default_rng(0)

    def alone(row, number):
        model.adapters.everywhere = adapters[number] if number >= 0 else None
        try:
            return logits(model, row)
        finally:
            model.adapters.everywhere = None

    for _ in range(6):
        numbers = draw.integers(-1, 3, len(rows))
        lengths = [len(row) for row in rows]
        positions = torch.cat([torch.arange(length) for length in lengths])
        with model.adapters.assign_rows(np.repeat(numbers, lengths)), torch.no_grad():
            together = model.logits(model.hidden(torch.cat(rows), positions, Packed.of(lengths))).split(lengths)
        for row, number, found in zip(rows, numbers.tolist(), together, strict=True):
            assert torch.equal(found, alone(row, number))


@pytest.mark.kernel_paths("best")
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_without_compiled_kernels_it_is_the_same_model(base, tmp_path, numerics):
    """In fast numerics these are then torch's own layers."""
    expected, before = logits(load(tiny_adapter(base, tmp_path / "a"))), ops.path_name()
    ops.use("exact-torch")
    try:
        model, plain = load(tmp_path / "a", numerics=numerics), load(base, numerics=numerics)
        found, unadapted = logits(model), logits(plain)
        for number, seed in enumerate((1, 2)):
            state = read(tiny_adapter(base, tmp_path / str(seed), seed=seed))
            plain.adapters.put(number, plain.adapters.fit(Adapter(state, plain.dtype, plain.device)))
        plain.adapters.put(2, plain.adapters.fit(Adapter(read(tmp_path / "a"), plain.dtype, plain.device)))
        with plain.adapters.assign_rows(np.repeat([0, 2, -1], [7, 40, 40])), torch.no_grad():
            rows, lengths = torch.cat([TOKENS[:7], TOKENS, TOKENS]), [7, 40, 40]
            positions = torch.cat([torch.arange(length) for length in lengths])
            _, mixed, none = plain.logits(plain.hidden(rows, positions, Packed.of(lengths))).split(lengths)
    finally:
        ops.use(before)
    assert (found - expected).abs().max() < 1e-4 < 1.0 < (unadapted - expected).abs().max()
    assert (mixed - found).abs().max() < 1e-4 and (none - unadapted).abs().max() < 1e-4


LYING = (("gpt_oss", 3), ("gpt2", 2))
"""Families whose weights of so many dimensions have inputs first."""


@pytest.mark.parametrize("family", ["qwen3", "gpt2", *MIXTURES])
def test_gradients_are_those_of_the_formula(family, tmp_path):
    """Against the library's own layers in float64, whose weights are W + scale * B A."""
    import transformers

    base = tiny_model(family, tmp_path / family, seed=4)
    model = load(adapter_of(base, tmp_path / "adapter"))
    adapter = model.adapters.everywhere
    model.module.requires_grad_(False)
    for parameter in adapter.parameters().values():
        parameter.requires_grad_(True)
    found = model.logits(model.hidden(TOKENS, TOKENS, Packed.of([40])))
    found.square().mean().backward()
    module = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    factors = {name: value.detach().double().requires_grad_(True) for name, value in adapter.parameters().items()}
    weights = {}
    for name in adapter.factors:
        product = adapter.scale * factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
        key = f"{name}.weight" if product.dim() == 2 else name
        weights[key] = module.state_dict()[key] + (product.mT if (family, product.dim()) in LYING else product)
    expected = torch.func.functional_call(module, weights, (TOKENS[None],)).logits[0]
    expected.square().mean().backward()
    assert torch.allclose(found.double(), expected, atol=1e-4, rtol=1e-4)
    for name, factor in factors.items():
        assert torch.allclose(adapter.parameters()[name].grad.double(), factor.grad, atol=1e-6, rtol=1e-3), name
    assert all(parameter.grad is None for parameter in model.parameters().values())
    assert sum(value.dim() == 3 for value in factors.values()) == (8 if stacks(base) else 0)


def test_layers_of_gpt2_lie_the_other_way_round(tmp_path):
    """Merged into its weights, an adapter gives what it gives beside them."""
    base = tiny_model("gpt2", tmp_path / "base", seed=4)
    model = load(adapter_of(base, tmp_path / "adapter"))
    assert {name.rpartition(".")[2] for name in model.adapters.everywhere.factors} == {"c_attn", "c_proj", "c_fc"}
    beside = model.logits(model.hidden(TOKENS, TOKENS, Packed.of([40])))
    merged = load(base)
    merged.load_state(model.adapters.everywhere.merged(merged.state(), targets_of(merged.module)))
    found = merged.logits(merged.hidden(TOKENS, TOKENS, Packed.of([40])))
    assert (found - beside).abs().max() < 1e-4
    assert targeted(merged.module, "default") == [f"transformer.h.{layer}.attn.c_attn" for layer in range(2)]


def test_target_modules_select_layers(qwen3):
    module = load(qwen3).module
    ends = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert {name.rpartition(".")[2] for name in targeted(module, "all-linear")} == set(ends)
    assert set(targeted(module, "default")) == set(targeted(module, ["q_proj", "v_proj"]))
    assert targeted(module, ["model.layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]
    for name in ("lm_head", "embed_tokens", "proj", "experts"):
        with refused_at("lora target_modules", f"got '{name}'"):
            targeted(module, [name])


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_adapted_where_they_are_named_and_routers_never(family, tmp_path):
    module = load(tiny_model(family, tmp_path / "moe")).module
    assert {name.rpartition(".")[2] for name in targeted(module, "all-linear")} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    named = targeted(module, (), ("experts.down_proj",))
    assert named == [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)]
    assert (
        targeted(module, (), ("down_proj",))
        == named
        == [name for name in targeted(module, ("q_proj",), EXPERTS) if "down" in name]
    )
    with refused_at("lora target_modules", "linear layers"):
        targeted(module, ["experts"])
    for name in ("gate.weight", "q_proj", "experts"):
        with refused_at("lora target_parameters", f"down_proj, gate_up_proj, got '{name}'"):
            targeted(module, (), [name])


def test_an_adapter_of_layers_leaves_experts_as_they_are(tmp_path):
    """Nobody looks for the rows of each expert then."""
    base = tiny_model("qwen3_moe", tmp_path / "qwen3_moe", seed=4)
    model = load(tiny_adapter(base, tmp_path / "adapter"))
    experts = [part for part in model.module.modules() if isinstance(part, RowExperts)]
    assert experts and not any(part.adapted.adds for part in experts)
    assert load(base).parts and all(part.adapted is None for part in load(base).parts if isinstance(part, RowExperts))


def test_invalid_factors_and_patterns_are_refused(qwen3, tmp_path):
    folder = tiny_adapter(qwen3, tmp_path / "adapter")
    tensors, settings = load_file(folder / TENSORS), json.loads((folder / CONFIG).read_text())
    for name in ("lm_head.weight", "model.embed_tokens.lora_embedding_A"):
        save_file({**tensors, f"base_model.model.{name}": torch.zeros(4, 4)}, folder / TENSORS)
        with refused_at(f"{folder}/{TENSORS}", f"factors of linear layers and of experts alone, got {name}"):
            load(folder)
    save_file(tensors, folder / TENSORS)
    for odd in ({"q_proj": "x"}, {"(": 4}, ["q_proj"], {"q_proj": -4}):
        (folder / CONFIG).write_text(json.dumps({**settings, "rank_pattern": odd}))
        with pytest.raises(BadInput, match="rank_pattern and alpha_pattern: numbers"):
            load(folder)


def test_a_model_without_experts_says_so(qwen3):
    with refused_at("lora target_parameters", "stacked matrices of experts of the model: none"):
        targeted(load(qwen3).module, "all-linear", EXPERTS[1:])


@pytest.mark.kernel_paths("best")
def test_experts_that_the_library_computes_are_refused_and_merged_all_the_same(tmp_path):
    base = tiny_model("qwen3_moe", tmp_path / "qwen3_moe", seed=4)
    folder, before = adapter_of(base, tmp_path / "adapter"), ops.path_name()
    expected = logits(load(folder))
    ops.use("exact-torch")
    try:
        with pytest.raises(BadInput, match="adapter .*: expected experts that our own layers compute"):
            load(folder, numerics="fast")
        export_folder(folder, tmp_path / "merged", "float32")
    finally:
        ops.use(before)
    assert (logits(load(tmp_path / "merged")) - expected).abs().max() < 1e-4


def test_the_scale():
    assert LoraConfig(rank=4, alpha=8).scale == 2.0
    assert LoraConfig(rank=4, alpha=8, rslora=True).scale == 4.0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
        ("alpha_pattern", {"q_proj": 2}),
        ("bias", "all"),
        ("peft_type", "IA3"),
        ("target_parameters", ["router.weight"]),
        ("r", 0),
        ("base_model_name_or_path", None),
    ],
)
def test_an_adapter_that_is_more_than_two_factors_is_refused_by_name(qwen3, tmp_path, setting, value):
    folder = tiny_adapter(qwen3, tmp_path)
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**settings, setting: value}))
    with pytest.raises(BadInput, match="rank" if setting == "r" else setting):
        load(folder)


def test_an_adapter_of_another_model_is_refused(qwen3, tmp_path):
    other = tiny_adapter(tiny_model("llama", tmp_path / "other", hidden_size=32), tmp_path / "adapter")
    mixture = adapter_of(tiny_model("mixtral", tmp_path / "mixtral"), tmp_path / "of experts")
    model = load(qwen3)
    for folder, message in ((other, "factors of a layer"), (mixture, "got 'model.layers.0.mlp.experts.down_proj'")):
        with pytest.raises(BadInput, match=message):
            model.adapters.fit(Adapter(read(folder), model.dtype, model.device))


def test_a_folder_is_read_as_it_was_written(qwen3, tmp_path):
    config = LoraConfig(rank=3, alpha=5, target_modules=("q_proj", "up_proj"), rslora=True)
    module = load(qwen3).module
    state = fresh_state(module, targeted(module, config.target_modules), 3, config.scale, seed=1)
    folder = write(state, config, qwen3, tmp_path / "adapter")
    found = read(folder)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    assert float(found[SCALE]) == config.scale and read_config(folder).scale == config.scale
    assert fresh_state(module, targeted(module, config.target_modules), 3, config.scale, seed=2).keys() == state.keys()


APART = ("layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj")


@pytest.mark.parametrize(
    "named", [EXPERTS, EXPERTS[:1], EXPERTS[1:], ("gate_up_proj", "mlp.experts.down_proj"), APART], ids=" ".join
)
def test_factors_of_experts_are_read_as_they_were_written(named, tmp_path):
    base = tiny_model("gpt_oss", tmp_path / "gpt_oss")
    folder = tiny_adapter(base, tmp_path / "adapter", rank=3, target_modules=("q_proj",), target_parameters=named)
    module = load(base).module
    config = read_config(folder)
    found = read(folder)
    assert found.keys() - {SCALE} == {
        f"{name}.lora_{f}.weight" for name in targeted(module, ("q_proj",), named) for f in "AB"
    }
    for name, target in targets_of(module).items():
        if f"{name}.lora_A.weight" in found:
            *experts, outputs, inputs = target.shape
            assert found[f"{name}.lora_A.weight"].shape == (*experts, 3, inputs)
            assert found[f"{name}.lora_B.weight"].shape == (*experts, outputs, 3)
    write(found, config, base, tmp_path / "again")
    again = read(tmp_path / "again")
    assert again.keys() == found.keys() and all(torch.equal(again[name], value) for name, value in found.items())
