"""A fresh model is a function of its seed; what is saved, everybody's tools load."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sparring.model.config import InitConfig, ModelConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.model.save import save
from sparring.testing.tiny_models import tiny_model

INIT = InitConfig(hidden_size=32, num_layers=2, head_dim=8, intermediate_size=48, max_positions=64)


def test_weights_depend_on_the_seed_alone(tmp_path):
    torch.manual_seed(1)
    one = load(create(INIT, 50, tmp_path / "one", 7)).state()
    torch.manual_seed(2)
    two = load(create(INIT, 50, tmp_path / "two", 7)).state()
    other = load(create(INIT, 50, tmp_path / "other", 8)).state()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_shape_and_scale_follow_the_config(tmp_path):
    folder = create(INIT, 50, tmp_path, 7, eos_token_id=[3, 4], pad_token_id=4)
    module = AutoModelForCausalLM.from_pretrained(folder)
    assert module.config.model_type == "qwen3" and module.config.tie_word_embeddings
    assert module.generation_config.eos_token_id == [3, 4]
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert abs(module.model.embed_tokens.weight.std().item() - INIT.initializer_range) < 0.002
    assert module.model.layers[0].input_layernorm.weight.eq(1).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_folder_is_plain_hugging_face(tmp_path, tied, dtype):
    init = msgspec.structs.replace(INIT, tie_embeddings=tied)
    source = create(init, 50, tmp_path / "source", 7, eos_token_id=3)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("hello")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("hello, tools")
    model = load(source, dtype=dtype)
    with torch.no_grad():
        model.state()["model.norm.weight"].mul_(1.25)
    out = save(model.state(), source, tmp_path / "out")
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"} <= {
        f.name for f in out.iterdir()
    }
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "hello, tools"
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert theirs.dtype == model.dtype
    saved = dict(theirs.named_parameters())
    assert saved.keys() == model.state().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state().items())
    assert theirs.generation_config.eos_token_id == 3


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_files_name_weights_as_the_library_does(family, tmp_path):
    source = tiny_model(family, tmp_path / "source")
    out = save(load(source).state(), source, tmp_path / "out")
    ours, theirs = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("wrong", [{"num_heads": 3}, {"head_dim": 7}, {"num_layers": 0}, {"max_positions": 1}])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        InitConfig(**wrong)


def test_a_model_has_exactly_one_origin():
    with pytest.raises(ValueError, match="exactly one"):
        ModelConfig()
    with pytest.raises(ValueError, match="exactly one"):
        ModelConfig(path="here", init=InitConfig())
