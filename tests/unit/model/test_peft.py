"""Adapters go to the PEFT library and come from it: `pytest -m extra` where it is installed."""

import json

import pytest
import torch
from common.tiny_adapters import tiny_adapter

from sparring.errors import BadInput
from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.model.peft import CONFIG, read, read_config, write
from sparring.model.save import save
from sparring.model.targets import targeted, targets_of
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.extra
TOKENS = torch.arange(40) % VOCABULARY
DEFAULTS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox")
"""Families for which that library knows a default; ours is the same rule for all."""
TOLERANCE = 1e-4
"""Of logits around 5, float32 against float64."""


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MIXTURES = ("qwen3_moe", "gpt_oss")


BASES = ("qwen3", "qwen2", "phi3", "gemma2", *MIXTURES)


@pytest.fixture(scope="module", params=BASES)
def base(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp("base") / request.param, seed=4)


def own_logits(path):
    model = load(path)
    with torch.no_grad():
        return model.logits(model.hidden(TOKENS, TOKENS, Packed.of([40]))).double()


def library(base):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


def adapter_of(base, out):
    return tiny_adapter(base, out, target_parameters=EXPERTS if base.name in MIXTURES else ())


@torch.no_grad()
def logits(module):
    return module(input_ids=TOKENS[None]).logits[0].double()


def test_the_library_reads_what_we_write(base, tmp_path):
    from peft import PeftModel

    folder = adapter_of(base, tmp_path / "adapter")
    found = PeftModel.from_pretrained(library(base), folder, autocast_adapter_dtype=False).double()
    assert (logits(found) - own_logits(folder)).abs().max() < TOLERANCE
    assert (logits(library(base)) - own_logits(folder)).abs().max() > 1.0


def written_by_the_library(base, folder, target_modules):
    """The library's model with an adapter that it has written to a folder."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=5,
        lora_alpha=7,
        use_rslora=True,
        target_modules=target_modules,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(library(base), config, autocast_adapter_dtype=False).double()
    theirs.save_pretrained(folder)
    return theirs


def assert_read(base, folder, target_modules):
    theirs = written_by_the_library(base, folder, target_modules)
    assert (logits(theirs) - own_logits(folder)).abs().max() < TOLERANCE
    assert (logits(library(base)) - own_logits(folder)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("target_modules", [r".*\.(o_proj|down_proj)", ["o_proj"]], ids=str)
def test_we_read_what_the_library_writes(base, tmp_path, target_modules):
    assert_read(base, tmp_path / "adapter", target_modules)


@pytest.mark.parametrize("base", [name for name in BASES if name != "qwen3_moe"], indirect=True)
def test_we_read_what_the_library_writes_of_all_linear_layers(base, tmp_path):
    assert_read(base, tmp_path / "adapter", "all-linear")


@pytest.mark.parametrize("base", ["qwen3_moe"], indirect=True)
def test_routers_that_the_library_adapts_are_refused(base, tmp_path):
    """It means them too by all-linear."""
    written_by_the_library(base, tmp_path / "adapter", "all-linear")
    with pytest.raises(BadInput, match="target_parameters that end in .*'gate.weight'"):
        load(tmp_path / "adapter")


def test_their_merge_is_ours(base, tmp_path):
    from peft import PeftModel

    folder = adapter_of(base, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(library(base), folder, autocast_adapter_dtype=False).double().merge_and_unload()
    model = load(folder)
    merged = model.adapters.everywhere.merged(model.state(), targets_of(model.module))
    for name, parameter in theirs.named_parameters():
        assert name not in merged or torch.allclose(merged[name].double(), parameter, atol=1e-6), name
    save(merged, base, tmp_path / "merged")
    assert (logits(library(tmp_path / "merged")) - own_logits(folder)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "ours", "theirs"), [("phi3", "all-linear", "all-linear"), *((f, "default", None) for f in DEFAULTS)]
)
def test_targets_agree_with_the_peft_library(tmp_path, family, ours, theirs):
    from peft import LoraConfig, get_peft_model

    base = tiny_model(family, tmp_path / "base")
    made = get_peft_model(library(base), LoraConfig(target_modules=theirs, task_type="CAUSAL_LM"))
    found = {name.partition(".lora_A")[0] for name, _ in made.named_parameters() if ".lora_A" in name}
    assert {f"base_model.model.{name}" for name in targeted(load(base).module, ours)} == found


@pytest.mark.parametrize(
    "named", [EXPERTS, EXPERTS[:1], EXPERTS[1:], ("down_proj", "mlp.experts.gate_up_proj")], ids=str
)
@pytest.mark.parametrize("family", MIXTURES)
def test_we_read_what_it_writes_of_experts(tmp_path, family, named):
    from peft import LoraConfig, get_peft_model

    base = tiny_model(family, tmp_path / "base", seed=4)
    config = LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules=["v_proj"],
        target_parameters=list(named),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(library(base), config, autocast_adapter_dtype=False).double()
    theirs.save_pretrained(tmp_path / "adapter")
    assert (logits(theirs) - own_logits(tmp_path / "adapter")).abs().max() < TOLERANCE
    assert (logits(library(base)) - own_logits(tmp_path / "adapter")).abs().max() > 100 * TOLERANCE


def test_ranks_may_differ_where_the_scale_is_one(tmp_path):
    """Of a model whose gates were layers of their own once, the library gives what it joined of them twice the rank."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tiny_model("qwen3_moe", tmp_path / "base", seed=4)
    config = LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(library(base), config, autocast_adapter_dtype=False).double()
    theirs.save_pretrained(tmp_path / "adapter")
    state = read(tmp_path / "adapter")
    assert state["model.layers.0.mlp.experts.gate_up_proj.lora_A.weight"].shape == (6, 10, 48)
    assert (logits(theirs) - own_logits(tmp_path / "adapter")).abs().max() < TOLERANCE
    write(state, read_config(tmp_path / "adapter"), base, tmp_path / "again")
    again = PeftModel.from_pretrained(library(base), tmp_path / "again", autocast_adapter_dtype=False).double()
    assert torch.equal(logits(again), logits(theirs))
    settings = json.loads((tmp_path / "again" / CONFIG).read_text())
    (tmp_path / "again" / CONFIG).write_text(json.dumps({**settings, "alpha_pattern": {}}))
    with pytest.raises(BadInput, match="alpha_pattern of one scale, 1.4, .*layers.0.mlp.experts.gate_up_proj"):
        read(tmp_path / "again")


def test_adapters_of_gpt2_go_both_ways(tmp_path):
    """That library says of such layers that they lie the other way round; the factors do not."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tiny_model("gpt2", tmp_path / "base", seed=4)
    config = LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    theirs = get_peft_model(library(base), config, autocast_adapter_dtype=False).double()
    theirs.save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / CONFIG).read_text())["fan_in_fan_out"]
    assert (logits(theirs) - own_logits(tmp_path / "theirs")).abs().max() < TOLERANCE
    ours = adapter_of(base, tmp_path / "ours")
    found = PeftModel.from_pretrained(library(base), ours, autocast_adapter_dtype=False).double()
    assert (logits(found) - own_logits(ours)).abs().max() < TOLERANCE
    assert min((logits(library(base)) - own_logits(one)).abs().max() for one in (ours, tmp_path / "theirs")) > 0.1
