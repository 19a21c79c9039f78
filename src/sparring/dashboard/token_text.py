"""Text of token ids for the viewer, read from a checkpoint's tokenizer.json alone.

Single tokens of a byte-level vocabulary need not be whole characters, so a piece is either text or bytes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal

PieceKind = Literal["", "special", "bytes"]
Piece = tuple[str, PieceKind]


def load_pieces(tokenizer_json: Path) -> dict[int, Piece]:
    """Return (text, kind) of every id of a tokenizer; kind is `special` for added tokens, `bytes` for part of a
    character.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON of the `tokenizers` library.
    """
    data = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    model = data["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: (piece, score) in id order
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    byte_level = any('"ByteLevel"' in json.dumps(data.get(part)) for part in ("pre_tokenizer", "decoder"))
    read = _byte_level_piece if byte_level else _plain_piece
    pieces: dict[int, Piece] = {index: read(piece) for piece, index in vocabulary.items()}
    for added in data.get("added_tokens", ()):
        pieces[added["id"]] = (added["content"], "special")
    return pieces


def _plain_piece(piece: str) -> Piece:
    """Decode SentencePiece's notation: a lower block for a space, `<0x0A>` for one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return _from_bytes(bytes([int(piece[3:5], 16)]))
    return piece.replace("\u2581", " "), ""


def _byte_level_piece(piece: str) -> Piece:
    """Decode GPT-2's notation: every character stands for one byte."""
    table = _byte_of_character()
    if not all(character in table for character in piece):
        return piece, ""
    return _from_bytes(bytes(table[character] for character in piece))


def _from_bytes(raw: bytes) -> Piece:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "‹" + raw.hex(" ") + "›", "bytes"
    return text, ""


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte-level alphabet: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on
    (Radford et al., GPT-2, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table
