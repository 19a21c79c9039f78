"""A tokenizer made on the spot: exact, deterministic, and the same to Hugging Face as to our renderer."""

from __future__ import annotations

import json

import pytest
from conversations import CONVERSATIONS, ODD, TOOL, without_tags
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused_at

from sparring.render.dialect import message_dicts, tool_dicts
from sparring.render.load import load_renderer
from sparring.render.tokenizer import load_tokenizer
from sparring.render.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from sparring.testing.toy import toy_renderer

TEXTS = ["What is 12 + 34? It is 46.", "def f(x):\n    return x + 1\n", "the cat sat on the mat, the cat sat"] * 3


def test_the_vocabulary_has_exactly_the_asked_size(tmp_path):
    for size in (MIN_VOCAB_SIZE, MIN_VOCAB_SIZE + 7, 2000):  # 2000 is more than these texts can fill
        assert load_tokenizer(train_tokenizer(TEXTS, size, tmp_path / str(size))).vocab_size == size
    with refused_at("vocab_size", "at least"):
        train_tokenizer(TEXTS, MIN_VOCAB_SIZE - 1, tmp_path / "small")


def test_the_same_texts_make_the_same_files(tmp_path):
    first, second, other = (
        train_tokenizer(texts, 330, tmp_path / name) for name, texts in [("1", TEXTS), ("2", TEXTS), ("3", TEXTS[:2])]
    )
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert (first / "tokenizer.json").read_bytes() != (other / "tokenizer.json").read_bytes()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_unchanged(text):
    tokenizer = toy_renderer().tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_those_of_the_family(tmp_path):
    written = json.loads((train_tokenizer(TEXTS, 400, tmp_path) / "tokenizer.json").read_text())
    special = {token["content"]: token["special"] for token in written["added_tokens"]}
    assert all(special[text] for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>"))
    content = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    assert not any(special[text] for text in content)
    tokenizer = load_tokenizer(tmp_path)
    assert all(len(tokenizer.encode(text)) == 1 for text in special)
    assert len(tokenizer.encode("1234")) == 4, "digits are single"


@pytest.mark.parametrize("thinking", [False, True])
def test_hugging_face_writes_the_same_ids(tmp_path, thinking):
    from transformers import AutoTokenizer

    train_tokenizer(TEXTS, 400, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_renderer(tmp_path, thinking=thinking)
    assert ours.name == "qwen3"
    assert theirs.eos_token_id in ours.stop_ids and len(theirs) == 400
    assert theirs.encode(ODD) == ours.tokenizer.encode(ODD)
    for written in CONVERSATIONS:  # what a message says is plain text to us, and a control token to them
        conversation = [without_tags(message) for message in written]
        for tools in ((), (TOOL,)):
            for generation in (False, True):
                expected = theirs.apply_chat_template(
                    message_dicts(conversation),
                    tools=tool_dicts(tools) or None,
                    add_generation_prompt=generation,
                    enable_thinking=thinking,
                    return_dict=False,
                )
                got = ours.render(conversation, tools, generation=generation).tokens
                assert theirs.decode(list(got)) == theirs.decode(expected)
                assert list(got) == expected
