"""Heads that say of lengths, counts and types what cannot be: refused before anything is made of them."""

from __future__ import annotations

import struct

import pytest

from sparring.errors import BadInput
from sparring.model.gguf.lengths import check_head


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _head(tensors: int, settings: int, rest: bytes = b"", magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, settings) + rest


def _array(kind: int, length: int) -> bytes:
    return _text(b"a") + struct.pack("<IIQ", 9, kind, length)


ARCHITECTURE = _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama")
TENSOR = _text(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)


@pytest.mark.parametrize(
    ("said", "head"),
    [
        ("GGUF at its beginning", _head(0, 0, magic=b"PK\3\4")),
        ("version 2 or 3", _head(0, 0, version=1)),
        ("byte order", _head(0, 0, version=3 << 24)),
        ("the file's end", _head(1 << 60, 1, ARCHITECTURE)),
        ("the file's end", _head(0, 1 << 60, ARCHITECTURE)),
        ("the file's end", _head(0, 1, struct.pack("<Q", 1 << 62) + b"abc")),
        ("the file's end", _head(0, 1, _text(b"a") + struct.pack("<IQ", 8, (1 << 64) - 1) + b"abc")),
        ("elements", _head(0, 1, _array(0, 1 << 60))),
        ("the file's end", _head(0, 1, _array(0, 1 << 20))),
        ("the file's end", _head(0, 1, _array(8, 1 << 20))),
        ("the type of a number", _head(0, 1, _array(9, 1))),
        ("the type of a number", _head(0, 1, _text(b"a") + struct.pack("<I", 13))),
        ("1 to 4 dimensions", _head(1, 0, _text(b"t") + struct.pack("<I", 1 << 31))),
        ("a dimension of 0", _head(1, 0, _text(b"t") + struct.pack("<IQQIQ", 2, 4, 0, 0, 0))),
    ],
)
def test_impossible_lengths_and_counts_are_refused(tmp_path, said, head):
    file = tmp_path / "m.gguf"
    file.write_bytes(head)
    with pytest.raises(BadInput, match=said):
        check_head(file)


def test_every_cut_is_refused(tmp_path):
    file, whole = tmp_path / "m.gguf", _head(1, 2, ARCHITECTURE + _array(4, 2) + bytes(8) + TENSOR)
    file.write_bytes(whole)
    check_head(file)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(BadInput, match="the file's end"):
            check_head(file)
