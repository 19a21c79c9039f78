"""Loading: refusals by name, what is swapped, which numerics are in use, updates of the weights."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from sparring.errors import BadInput, WeightsError
from sparring.kernels import ops
from sparring.model.attention import Packed
from sparring.model.layers import RotaryTable, RowLinear, RowNorm, RowSilu, WideNorm
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model

on_every_path = pytest.mark.usefixtures("kernel_path")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3", tied=True)


def logits(model, rows):
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    hidden = model.hidden(
        torch.cat([torch.tensor(row) for row in rows]), positions, Packed.of([len(row) for row in rows])
    )
    return model.logits(hidden)


def test_shape_is_read_from_the_config(path):
    model = load(path)
    assert model.kv_heads == ops.KvHeads.uniform(num_layers=2, num_heads=2, head_dim=16)
    assert (model.vocab_size, model.max_positions, model.dtype) == (VOCABULARY, 256, torch.float32)
    assert model.path_name == ops.path_name()
    assert load(path, numerics="fast").path_name == "fast"


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(BadInput, match="expected a checkpoint"):
        load(tmp_path / "nothing")
    with pytest.raises(BadInput, match="got a folder without one"):
        load(tmp_path)


def test_unknown_dtype_and_numerics_are_refused(path):
    with pytest.raises(BadInput, match="dtype"):
        load(path, dtype="float16")
    with pytest.raises(BadInput, match="numerics"):
        load(path, numerics="quick")


def test_recurrent_layers_are_refused_by_name(tmp_path):
    tiny_model("qwen3_next", tmp_path, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    with pytest.raises(BadInput, match="linear_attention"):
        load(tmp_path)


def test_model_that_changes_with_the_batch_is_refused_under_exact_only(tmp_path):
    tiny_model("minimax_m3_vl_text", tmp_path)
    with pytest.raises(
        BadInput, match='MiniMaxM3VLForCausalLM, whose logits may; .*row by row: grouped_mm, .*numerics = "fast"'
    ):
        load(tmp_path)
    assert load(tmp_path, numerics="fast").path_name == "fast"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [0.95, 0.25, 1.0])
def test_a_constant_that_logits_are_multiplied_by_is_found(scale, dtype, tmp_path):
    """One near 1 too, which bfloat16 alone would hardly tell from 1."""
    tiny_model("cohere", tmp_path, logit_scale=scale)
    assert load(tmp_path, dtype=dtype).logit_scale == scale


@pytest.mark.parametrize("family", ["opt", "biogpt", "phimoe"])
def test_gradient_checkpointing_samples_nothing(family, tmp_path):
    """Dropout and noise of routers, whatever they are called, are off in training too."""
    model, again = (
        load(tiny_model(family, tmp_path, num_key_value_heads=4), gradient_checkpointing=True) for _ in range(2)
    )
    rows = [[1, 2, 3], list(range(40))]
    found = logits(model, rows)
    assert torch.equal(found, logits(again, rows)) and torch.equal(found, logits(model, rows))
    with torch.no_grad():
        assert torch.equal(found, logits(load(tmp_path), rows))


@pytest.mark.full
def test_kernels_that_cannot_be_built_are_not_the_models_fault(tmp_path):
    code = f"from sparring.model.load import load; load({str(tiny_model('llama', tmp_path / 'tiny'))!r})"
    environment = {**os.environ, "CXX": "false", "SPARRING_CACHE": str(tmp_path / "cache")}
    environment.pop("SPARRING_KERNELS", None)
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "exit status 1" in ended.stderr and "choose another model" not in ended.stderr


@pytest.mark.full
def test_too_little_memory_is_not_the_checkpoints_fault(tmp_path):
    path = tiny_model("cohere", tmp_path, hidden_size=256, intermediate_size=40_000)
    code = (
        "import re, resource\n"
        "from sparring.model.load import load\n"
        f"load({str(tiny_model('cohere', tmp_path / 'small'))!r})\n"
        "used = int(re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (260 << 20),) * 2)\n"
        f"load({str(path)!r})\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "expected memory for it" in ended.stderr, ended.stderr[-500:]


def test_head_that_does_more_than_a_matrix_product_is_refused(tmp_path):
    tiny_model("modernbert-decoder", tmp_path)
    with pytest.raises(BadInput, match="ModernBertDecoderForCausalLM, whose logits differ"):
        load(tmp_path)


def qwen2_moe(folder, window):
    settings = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return tiny_model(
        "qwen2_moe",
        folder,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=2,
        **settings,
    )


def test_a_family_that_may_have_a_window_is_served_without_one(tmp_path):
    assert load(qwen2_moe(tmp_path, None), numerics="fast").path_name == "fast"


def test_a_window_that_the_library_masks_by_and_does_not_tell_is_refused(tmp_path):
    qwen2_moe(tmp_path, 64)
    with pytest.raises(BadInput, match="Qwen2MoeForCausalLM, whose logits differ"):
        load(tmp_path, numerics="fast")


def test_the_proof_restores_the_window(tmp_path):
    model = load(tiny_model("gemma2", tmp_path))
    windows = [layer.self_attn.sliding_window for layer in model.module.model.layers]
    assert (model.config.sliding_window, windows) == (24, [24, None])


def test_attention_in_both_directions_is_refused(tmp_path):
    tiny_model("gemma2", tmp_path, use_bidirectional_attention=True)
    with pytest.raises(BadInput, match="both directions"):
        load(tmp_path)


def test_attention_of_its_own_is_refused(tmp_path):
    tiny_model("bloom", tmp_path)
    with pytest.raises(BadInput, match="BloomForCausalLM, which has an attention of its own"):
        load(tmp_path, numerics="fast")


def test_frequencies_that_depend_on_the_length_are_refused_under_exact(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny_model("llama", tmp_path, rope_parameters=rope)
    with pytest.raises(BadInput, match="rope_type 'dynamic'"):
        load(tmp_path)


def test_a_sliding_window_does_not_bound_the_positions(tmp_path):
    assert load(tiny_model("mistral", tmp_path, sliding_window=24)).max_positions == 256


@on_every_path
def test_known_family_runs_the_lean_decoder_and_every_part_is_row_invariant(path):
    model = load(path)
    assert model.decoder is not None
    parts = {type(part) for part in model.module.modules() if not list(part.children())}
    assert parts == {torch.nn.Embedding, RowLinear, RowNorm, RowSilu, RotaryTable}


@pytest.mark.parametrize(("family", "norm"), [("gemma2", WideNorm), ("gpt_oss", WideNorm), ("mixtral", RowNorm)])
def test_a_norm_is_replaced_by_the_one_that_rounds_like_it(family, norm, tmp_path):
    model = load(tiny_model(family, tmp_path), dtype="bfloat16")
    assert {type(part) for part in model.module.modules() if "Norm" in type(part).__name__} == {norm}


def test_a_known_family_with_another_activation_runs_the_librarys_forward(tmp_path):
    model = load(tiny_model("llama", tmp_path / "a", hidden_act="gelu_pytorch_tanh"))
    assert model.decoder is None and model.path_name == ops.path_name()
    model = load(tiny_model("llama", tmp_path / "b", hidden_act="gelu"))  # a function of torch, row by row
    assert model.decoder is None and model.path_name == ops.path_name()


@on_every_path
def test_unknown_family_passes_its_proof(tmp_path):
    model = load(tiny_model("olmo2", tmp_path))
    assert model.decoder is None
    rows = [[1, 2, 3], [4], list(range(40))]
    together = logits(model, rows).split([len(row) for row in rows])
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(found, logits(model, [row]))


@on_every_path
def test_rows_do_not_depend_on_the_packing(path):
    model = load(path)
    rows = [[(3 * i + j) % VOCABULARY for j in range(length)] for i, length in enumerate([1, 2, 30, 7, 64, 5])]
    together = logits(model, rows).split([len(row) for row in rows])
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(found, logits(model, [row]))


@on_every_path
def test_training_mode_changes_nothing(tmp_path):
    model = load(tiny_model("llama", tmp_path, attention_dropout=0.5), gradient_checkpointing=True)
    assert torch.equal(logits(model, [[1, 2, 3]]), logits(model, [[1, 2, 3]]))
    model = load(tiny_model("mixtral", tmp_path / "b", router_jitter_noise=0.5), gradient_checkpointing=True)
    assert torch.equal(logits(model, [[1, 2, 3]]), logits(model, [[1, 2, 3]]))


def test_gradient_checkpointing_of_the_librarys_layers_warns_of_nothing(tmp_path):
    path = tiny_model("olmo2", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model = load(path, gradient_checkpointing=True)
    assert all(layer.gradient_checkpointing for layer in model.module.base_model.layers)


@on_every_path
def test_state_has_a_tied_weight_once_and_loads_elsewhere(path, tmp_path):
    source, target = load(path), load(tiny_model("qwen3", tmp_path, tied=True, seed=9))
    assert "lm_head.weight" not in source.state()
    assert not torch.equal(logits(source, [[1, 2, 3]]), logits(target, [[1, 2, 3]]))
    target.load_state(source.state())
    assert torch.equal(logits(source, [[1, 2, 3]]), logits(target, [[1, 2, 3]]))
    assert source.state()["model.norm.weight"].data_ptr() != target.state()["model.norm.weight"].data_ptr()


@on_every_path
def test_state_that_does_not_fit_changes_nothing(path):
    model = load(path)
    before = logits(model, [[1, 2, 3]])
    state = {name: tensor.clone().zero_() for name, tensor in model.state().items()}
    with pytest.raises(WeightsError, match="model.norm.weight should be"):
        model.load_state({**state, "model.norm.weight": torch.zeros(3)})
    del state["model.norm.weight"]
    with pytest.raises(WeightsError, match="model.norm.weight"):
        model.load_state(state)
    assert torch.equal(before, logits(model, [[1, 2, 3]]))


@on_every_path
def test_refresh_sees_changed_parameters(path):
    model = load(path)
    before = logits(model, [[1, 2, 3]])
    with torch.no_grad():
        model.state()["model.layers.1.mlp.down_proj.weight"].mul_(1.5)
    model.refresh()
    assert not torch.equal(before, logits(model, [[1, 2, 3]]))


@on_every_path
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_and_routers_load_elsewhere(family, tmp_path):
    source, target = (load(tiny_model(family, tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    assert not torch.equal(logits(source, [[1, 2, 3]]), logits(target, [[1, 2, 3]]))
    target.load_state(source.state())
    assert torch.equal(logits(source, [[1, 2, 3]]), logits(target, [[1, 2, 3]]))
