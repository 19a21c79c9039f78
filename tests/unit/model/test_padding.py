"""Scores of a reward model's folder are those of transformers, whatever its config calls padding, end and beginning."""

import asyncio
import json
import random

import pytest
import torch
from refusals import refused_at
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sparring.engine.reward import RewardModel
from sparring.model.load import load
from sparring.model.padding import scored_part
from sparring.model.save import save
from sparring.render.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from sparring.testing.tiny_models import tiny_model

ROWS = MIN_VOCAB_SIZE + 20
"""Rows of the embedding: four more than the tokenizer has ids."""
NEAR = 1e-4


@pytest.fixture(params=["qwen3"])
def source(request, tmp_path):
    """A language model with the tokenizer and the chat template of ChatML."""
    folder = tiny_model(request.param, tmp_path / "source", seed=3, vocab_size=ROWS)
    train_tokenizer([], ROWS - 4, folder)
    return folder


def names(folder):
    return {
        token["content"]: token["id"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }


def changed(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def reward_model(source, out):
    model = load(source, head="new scalar", numerics="fast")
    with torch.no_grad():
        model.state()["score.weight"].normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    return save(model.state(), source, out)


def texts(ends):
    """Return texts of several lengths, some of which end with the ids that may end a turn or a text."""
    draw = random.Random(4)
    rows = [[draw.randrange(3, 250) for _ in range(length)] for length in (1, 9, 4, 17, 6, 3)]
    return [row + end for row, end in zip(rows, [[], ends[:1], ends[1:], ends, ends[::-1], ends[:1] * 3], strict=True)]


def ours(folder, rows):
    async def main():
        model = RewardModel(load(folder, head="scalar", numerics="fast"))
        try:
            return await model.values(rows)
        finally:
            await model.close()

    return asyncio.run(main())


@torch.no_grad()
def theirs(folder, rows, side):
    """Score a batch that is padded as the tokenizer of the folder pads."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    places = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return model(**batch, position_ids=places).logits[:, 0].tolist()


PADS = {
    "none": None,
    "end": "<|im_end|>",
    "end of text": "<|endoftext|>",
    "begin": "<|im_start|>",
    "first": 0,
    "unused": "<|video_pad|>",
    "row": ROWS - 1,
}
"""What the base calls padding: no id, one that ends or begins texts, an ordinary one, a token that nothing writes, a row
of the embedding without a token."""

SHORT = [("qwen3", "end"), ("qwen3", "none"), ("gpt2", "end"), ("gemma2", "unused")]
EVERY = [
    *SHORT,
    *(pytest.param("qwen3", pad, marks=pytest.mark.slow) for pad in PADS if ("qwen3", pad) not in SHORT),
]


@pytest.mark.parametrize(("source", "pad"), EVERY, indirect=["source"])
def test_a_written_folder_has_a_padding_that_no_text_has(source, tmp_path, pad):
    ids = names(source)
    end, also, begin = ids["<|im_end|>"], ids["<|endoftext|>"], ids["<|im_start|>"]
    changed(source, pad_token_id=ids.get(PADS[pad], PADS[pad]), eos_token_id=[end, also], bos_token_id=begin)
    folder = reward_model(source, tmp_path / "judge")
    rows = texts([end, also])
    found = json.loads((folder / "config.json").read_text())["pad_token_id"]
    assert found == (ids["<|video_pad|>"] if pad == "unused" else max(ids.values()))
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == found
    for side in ("right", "left"):
        assert ours(folder, rows) == pytest.approx(theirs(folder, rows, side), abs=NEAR)


@pytest.mark.parametrize(("source", "pad"), EVERY, indirect=["source"])
def test_a_foreign_folder_is_read_where_transformers_reads_it(source, tmp_path, pad):
    ids, folder = names(source), reward_model(source, tmp_path / "judge")
    end, also = ids["<|im_end|>"], ids["<|endoftext|>"]
    changed(folder, pad_token_id=ids.get(PADS[pad], PADS[pad]), eos_token_id=end)
    rows = texts([end, also])
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([row])).logits.item() for row in rows]
    assert ours(folder, rows) == pytest.approx(expected, abs=NEAR)


def test_without_a_token_to_spare_there_is_no_padding(source, tmp_path):
    """transformers then refuses batches instead of reading another score."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if "im_" in token["content"]]
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    changed(source, pad_token_id=names(source)["<|im_end|>"], eos_token_id=names(source)["<|im_end|>"])
    folder = reward_model(source, tmp_path / "judge")
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] is None
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(ValueError, match="no padding token"):
        model(torch.ones(2, 3, dtype=torch.int64))


def test_a_padding_beyond_the_vocabulary_is_refused(tmp_path):
    folder = tiny_model("qwen3", tmp_path / "source")
    changed(folder, pad_token_id=4000)
    with refused_at(str(folder), "a checkpoint that the library loads"):
        load(folder, head="new scalar")


def test_padding_at_the_end_does_not_count():
    assert scored_part([5, 0, 7, 0, 0], 0) == [5, 0, 7]
    assert scored_part([5, 0], None) == [5, 0]
    assert scored_part([0, 0, 0], 0) == [0]
