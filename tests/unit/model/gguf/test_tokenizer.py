"""Tokenizers of GGUF files that the transformers library reads otherwise than their makers: ids, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer
from unit.model.gguf import written

from sparring.errors import BadInput
from sparring.model.gguf.tokenizer import check_tokenizer, write_tokenizer
from sparring.render.chat_template import read_chat_template

GGML = "tokenizer.ggml."


def _made(folder: Path, tokenizer: dict) -> tuple[Path, dict]:
    file = written.write_model(folder / "m.gguf", tokenizer=tokenizer)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    check_tokenizer(file, fields, written.IDS, None)
    out = folder / "out"
    out.mkdir()
    write_tokenizer(file, fields, None, out, "llama")
    return out, fields


@pytest.fixture
def tokens(tmp_path: Path) -> list[str]:
    backend = Tokenizer.from_file(str(written.tokenizer_file(tmp_path / "tokenizer")))
    return [backend.id_to_token(id) for id in range(written.IDS)]


def test_added_tokens_of_any_letters_keep_their_ids(tmp_path, tokens):
    places = {"<｜User｜>": 400, "<｜begin▁of▁sentence｜>": 401, "  ": 402, "\n\n\n": 403, "<é漢>": 404}
    for token, id in places.items():
        tokens[id] = token
    out, _ = _made(tmp_path, {f"{GGML}tokens": tokens, f"{GGML}bos_token_id": 401})
    ours = Tokenizer.from_file(str(out / "tokenizer.json"))
    for token, id in places.items():
        assert ours.encode(f"it{token}it").ids == [*ours.encode("it").ids, id, *ours.encode("it").ids]
    assert ours.get_vocab_size() == written.IDS
    assert json.loads((out / "tokenizer_config.json").read_text())["bos_token"] == "<｜begin▁of▁sentence｜>"


def test_no_blank_is_set_before_a_text_where_the_file_says_so(tmp_path):
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁thecook", "▁t", "▁th", "▁the"]
    pieces = list(dict.fromkeys(pieces))
    head = ["<unk>", "<s>", "</s>"]
    kinds = [2, 3, 3, *(6 if piece.startswith("<0x") else 1 for piece in pieces)]
    tokenizer = {
        f"{GGML}model": "llama", f"{GGML}pre": None, f"{GGML}merges": None, f"{GGML}padding_token_id": None,
        f"{GGML}tokens": [*head, *pieces], f"{GGML}token_type": kinds,
        f"{GGML}scores": [-float(at) for at in range(len(kinds))],
        f"{GGML}bos_token_id": 1, f"{GGML}eos_token_id": 2, f"{GGML}add_space_prefix": False,
    }  # fmt: skip
    out, _ = _made(tmp_path, tokenizer)
    ours = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = ours.encode("cook the", add_special_tokens=False).ids
    assert [ours.id_to_token(id) for id in ids] == ["c", "o", "o", "k", "▁the"]
    assert ours.decode(ids[4:]) == " the"


def test_named_templates_are_kept(tmp_path):
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "with {{ tools|length }}"}
    out, fields = _made(tmp_path, named)
    template = read_chat_template(out, {})
    assert template is not None and template.source == fields["tokenizer.chat_template"]
    assert template.text([], [{}], generation=False, thinking=None) == "with 1"


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("kinds of tokens", {f"{GGML}token_type": None}),
        ("kinds of tokens", {f"{GGML}token_type": [1, 1]}),
        ("every token once", {f"{GGML}tokens": ["a"] * written.IDS}),
        ("rows of the embedding", {f"{GGML}tokens": [str(id) for id in range(written.IDS + 1)]}),
        ("eot_token_id below", {f"{GGML}eot_token_id": written.IDS}),
        ("bos_token_id below", {f"{GGML}bos_token_id": (1 << 32) - 1}),
        ("out of vocabulary", {f"{GGML}merges": ["zzq qqz"]}),
        ("a gpt2 tokenizer with tokenizer.ggml.merges, got none", {f"{GGML}merges": None}),
        ("a gpt2 tokenizer with tokenizer.ggml.pre, got none", {f"{GGML}pre": None}),
        ("a llama tokenizer with tokenizer.ggml.scores", {f"{GGML}model": "llama", f"{GGML}merges": None}),
        ("a token that ends replies", {f"{GGML}eos_token_id": None}),
        ("eos_token_id below", {f"{GGML}eos_token_id": "2"}),
    ],
)
def test_mismatched_tokenizers_are_refused(tmp_path, said, changes):
    with pytest.raises(BadInput, match=said):
        _made(tmp_path, changes)


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "qwen2"])
def test_words_of_the_vocabulary_are_whole_where_llama_cpp_takes_them_so(tmp_path, tokens, pre):
    """ "cook" is a token that no merge makes."""
    tokens[300:302] = "cook", "he"
    out, _ = _made(
        tmp_path, {f"{GGML}tokens": tokens, f"{GGML}pre": pre, f"{GGML}bos_token_id": 0, f"{GGML}merges": ["h e"]}
    )
    whole = pre != "qwen2"
    ids = Tokenizer.from_file(str(out / "tokenizer.json")).encode("cook", add_special_tokens=False).ids
    assert (ids == [300]) is whole
    assert (json.loads((out / "tokenizer_config.json").read_text()).get("add_bos_token") is True) is whole
