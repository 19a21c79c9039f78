"""Of a model that sees too, the part for text is served and trained; what is saved is whole."""

import pytest
import torch
from suite import short_of
from transformers import AutoConfig, AutoModelForImageTextToText

from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.model.save import save
from sparring.model.targets import linears_of
from sparring.testing.tiny_models import VOCABULARY, tiny_model

TOKENS = torch.arange(30) * 7 % VOCABULARY
KINDS = ("gemma3", "gemma4", "qwen3_vl", "qwen2_5_vl", "glm4v", "mistral3", "internvl", "llava", "qwen3_5")


def logits(model):
    return model.logits(model.hidden(TOKENS, torch.arange(30), Packed.of([30])))


@pytest.mark.parametrize("kind", short_of(KINDS, ("gemma3", "qwen2_5_vl", "qwen3_5")))
def test_text_is_served_and_what_is_saved_is_whole(kind, tmp_path):
    source = tiny_model(kind, tmp_path / "source", seed=3)
    theirs = AutoModelForImageTextToText.from_pretrained(source)
    model = load(source, numerics="fast" if kind == "qwen3_5" else "exact")
    assert not any("vis" in name or "projector" in name for name in model.state())
    assert (
        0
        < sum(tensor.numel() for tensor in model.state().values())
        < sum(parameter.numel() for parameter in theirs.parameters())
    )
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(input_ids=TOKENS[None]).logits[0], rtol=1e-3, atol=1e-4)
    logits(model).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters().values():
            if parameter.grad is not None:
                parameter += 0.01 * parameter.grad.sign()
    model.refresh()
    trained = logits(model)
    assert not torch.allclose(trained, theirs(input_ids=TOKENS[None]).logits[0], rtol=1e-3, atol=1e-4)
    saved, found = AutoModelForImageTextToText.from_pretrained(
        save(model.state(), source, tmp_path / "saved"), output_loading_info=True
    )
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoConfig.from_pretrained(tmp_path / "saved").model_type == kind
    torch.testing.assert_close(saved(input_ids=TOKENS[None]).logits[0], trained, rtol=1e-3, atol=1e-4)
    state, ours = saved.state_dict(), model.state()
    kept = {
        name: tensor for name, tensor in theirs.state_dict().items() if name not in ours and name != "lm_head.weight"
    }
    assert kept and all(torch.equal(tensor, state[name]) for name, tensor in kept.items())


def test_adapters_are_for_text(tmp_path):
    model = load(tiny_model("gemma3", tmp_path))
    assert {name.split(".")[1] for name in linears_of(model.module)} == {"language_model"}


def test_a_scalar_head_is_kept_trained_and_saved(tmp_path):
    source = tiny_model("gemma3", tmp_path / "source")
    model = load(source, head="new scalar")
    hidden = model.hidden(TOKENS, torch.arange(30), Packed.of([30]))
    model.values(hidden).sum().backward()
    head = model.parameters()["score.weight"]
    assert head.grad is not None and head.grad.abs().sum() > 0
    with torch.no_grad():
        head.normal_(generator=torch.Generator().manual_seed(1))
    model.refresh()
    saved = save(model.state(), source, tmp_path / "saved")
    assert AutoConfig.from_pretrained(saved).architectures == ["Gemma3ForSequenceClassification"]
    again = load(saved, head="scalar")
    assert torch.equal(again.values(again.hidden(TOKENS, torch.arange(30), Packed.of([30]))), model.values(hidden))


@pytest.mark.parametrize("seed", range(6))
def test_a_cap_that_hardly_bends_is_kept(seed, tmp_path):
    """Noise must not choose what function is computed."""
    tiny_model("gemma2", tmp_path, seed=seed, final_logit_softcapping=300.0)
    assert load(tmp_path, dtype="bfloat16").logit_cap == 300.0
