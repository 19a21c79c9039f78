"""Bytes of single ids: those of a text's ids are the text's."""

from __future__ import annotations

import pytest
from conversations import ODD
from formats import FORMATS, format_renderer
from tokenizers import AddedToken, Tokenizer, decoders, models

from sparring.render.tokenizer import FileTokenizer


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_ids_of_a_tokenizer_of_bytes_have_the_bytes_of_their_text(name: str) -> None:
    tokenizer = format_renderer(name).tokenizer
    for id in range(tokenizer.vocab_size):
        assert tokenizer.bytes_of(id).decode(errors="replace") == tokenizer.decode([id])
    for text in (ODD, "Grüße, 世界 🙂!", *FORMATS[name], "\x00\x7f\xa0\xad"):
        assert b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))) == text.encode()
    assert tokenizer.bytes_of(tokenizer.vocab_size + 1) == b""


def test_ids_of_another_tokenizer_have_the_bytes_of_their_text() -> None:
    backend = Tokenizer(models.WordLevel({"ü": 0, "b": 1}, unk_token="b"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = FileTokenizer(backend, {}, "here")
    assert not tokenizer.decodes_bytes
    assert [tokenizer.bytes_of(id) for id in range(4)] == ["ü".encode(), b"b", b"<end>", b""]
