"""What a folder is, is told by the class that its config names: whoever opens it gets the head that it has, or is refused
by a sentence that names the folder, what it is, what was expected and what to do."""

import json
import shutil

import pytest
import torch
from refusals import refused_at
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

from sparring.model.attention import Packed
from sparring.model.config import LoraConfig
from sparring.model.load import load, without_weights
from sparring.model.lora import fresh_state
from sparring.model.outline import outline
from sparring.model.peft import write
from sparring.model.save import save
from sparring.model.servable import check_servable
from sparring.model.targets import targeted
from sparring.stages.export import export_folder
from sparring.stages.models.context_length import outline_of
from sparring.testing.tiny_models import tiny_model

FOLDERS = [("qwen3", True), ("gpt2", False), pytest.param(("gemma2", True), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FOLDERS)
def folders(request, tmp_path_factory):
    """A language model, and a reward model with random weights that was made of it."""
    family, tied = request.param
    source = tiny_model(family, tmp_path_factory.mktemp("model") / "source", tied=tied, seed=2)
    return source, reward_model(source, source.parent / "scalar")


def reward_model(source, out):
    model = load(source, head="new scalar", numerics="fast")
    with torch.no_grad():
        model.state()["score.weight"].normal_(0.0, 0.2, generator=torch.Generator().manual_seed(1))
    return save(model.state(), source, out)


def described(folder, out, **changes):
    """Copy a folder with another config."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return out


OPENED = {
    "load": lambda folder: load(folder, numerics="fast"),
    "preflight": lambda folder: check_servable(folder, dtype="float32", device="cpu", numerics="fast"),
    "preflight of a large one": lambda folder: check_servable(
        folder, dtype="float32", device="cpu", numerics="fast", small_bytes=0
    ),
    "outline": lambda folder: outline(folder, numerics="fast"),
    "checkpoint": outline_of,
    "sent files": lambda folder: without_weights(folder, dtype="float32", numerics="fast"),
    "new critic": lambda folder: load(folder, numerics="fast", head="new scalar"),
}


@pytest.mark.parametrize("opened", OPENED)
def test_a_reward_model_is_no_language_model(folders, opened):
    _, folder = folders
    with refused_at(
        str(folder / "config.json"), "ForSequenceClassification, a reward model or critic; name the language"
    ):
        OPENED[opened](folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_is_kept_in_every_export(folders, tmp_path, dtype):
    source, folder = folders
    export_folder(folder, tmp_path / "out", dtype)
    with (
        safe_open(tmp_path / "out/model.safetensors", "pt") as tensors,
        safe_open(folder / "model.safetensors", "pt") as before,
    ):
        assert set(tensors.keys()) == set(before.keys())
        head = tensors.get_tensor("score.weight")
        assert head.equal(before.get_tensor("score.weight").to(getattr(torch, dtype)))
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (source / "config.json").stat().st_mode
    theirs, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and theirs.config.num_labels == 1
    assert theirs.config.architectures == [type(theirs).__name__]


def test_an_adapter_of_a_reward_model_is_merged_below_its_head(folders, tmp_path):
    _, folder = folders
    model, config = load(folder, head="scalar", numerics="fast"), LoraConfig(rank=2)
    names = targeted(model.module, config.target_modules, ())
    state = fresh_state(model.module, names, 2, config.scale, 0)
    for tensor in state.values():
        if tensor.dim() == 2:
            tensor.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(3))
    adapter = write(state, config, folder, tmp_path / "adapter")
    export_folder(adapter, tmp_path / "out", "float32")
    ids = torch.arange(9)[None]
    with_adapter = load(adapter, head="scalar", numerics="fast")
    hidden = with_adapter.hidden(ids[0], torch.arange(9), Packed.of([9]))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert theirs(ids).logits.item() == pytest.approx(with_adapter.values(hidden)[-1].item(), abs=1e-4)
    with refused_at(str(folder / "config.json"), "a language model"):
        load(adapter, numerics="fast")


STRANGE = {
    "no class": ({"architectures": ...}, "got no class (architectures); write the class of the model there"),
    "no text": ({"architectures": [1]}, "got 1; "),
    "null": ({"architectures": None}, "got no class (architectures)"),
    "of tokens": ({"architectures": ["Qwen3ForTokenClassification"]}, "got Qwen3ForTokenClassification; "),
    "trunk": ({"architectures": ["Qwen3Model"]}, "got Qwen3Model; "),
    "two": (
        {"architectures": ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"]},
        "got Qwen3ForCausalLM and Qwen3ForSequenceClassification; ",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("head", ["tokens", "scalar", "new scalar", "own"])
def test_what_is_neither_is_refused_by_name(tmp_path, name, head):
    changes, got = STRANGE[name]
    folder = described(tiny_model("qwen3", tmp_path / "source", tied=True), tmp_path / "other", **changes)
    with refused_at(str(folder / "config.json"), got):
        load(folder, head=head)


@pytest.mark.parametrize("labels", [2, 3])
def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path, labels):
    scalar = reward_model(tiny_model("qwen3", tmp_path / "source"), tmp_path / "scalar")
    names = {str(n): f"LABEL_{n}" for n in range(labels)}
    folder = described(scalar, tmp_path / "other", id2label=names, label2id={name: int(n) for n, name in names.items()})
    for head in ("tokens", "scalar", "own"):
        with refused_at(str(folder / "config.json"), f"Qwen3ForSequenceClassification with {labels} labels"):
            load(folder, head=head)
    unnamed = described(scalar, tmp_path / "unnamed", id2label=..., label2id=...)  # transformers then counts two
    with refused_at(str(unnamed / "config.json"), "with 2 labels"):
        load(unnamed, head="scalar")


def test_a_model_with_an_encoder_is_refused(tmp_path):
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16, "num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for head in ("tokens", "scalar"):
        with refused_at(str(tmp_path / "config.json"), "got T5ForConditionalGeneration; "):
            load(tmp_path, head=head, numerics="fast")
