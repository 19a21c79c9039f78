"""The renderer of gpt-oss, over a tokenizer made from the vocabulary o200k_base."""

from __future__ import annotations

import base64
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from sparring.render.library import LibraryRenderer
from sparring.render.load import load_renderer
from sparring.render.tokenizer import byte_letters

_NAMES = {
    **{199998: "startoftext", 199999: "endoftext", 200002: "return", 200003: "constrain", 200005: "channel"},
    **{200006: "start", 200007: "end", 200008: "message", 200012: "call", 200018: "endofprompt"},
}
_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Pattern of the pieces of a text that are encoded separately, close to the vocabulary's own rules, which distinguish
upper and lower case."""

_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
"""Environment variable with the folder of the vocabulary, which the library downloads otherwise."""


@functools.cache
def harmony_renderer(ranks: Path) -> LibraryRenderer:
    """Return the library's renderer of gpt-oss, cached per process; the first call takes some seconds.

    Args:
        ranks: file of o200k_base, with a token in base64 and its rank in each line. The library checks its contents.
    """
    before = os.environ.get(_FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(ranks, Path(folder, "o200k_base.tiktoken"))
        lines = [line.split() for line in ranks.read_bytes().splitlines()]
        _tokenizer({base64.b64decode(token): int(rank) for token, rank in lines}).save(f"{folder}/tokenizer.json")
        os.environ[_FOLDER] = folder
        try:
            renderer = load_renderer(folder, "gpt-oss")
        finally:
            del os.environ[_FOLDER]
            if before is not None:
                os.environ[_FOLDER] = before
    assert isinstance(renderer, LibraryRenderer)
    return renderer


def _tokenizer(ranks: Mapping[bytes, int]) -> Tokenizer:
    """Return the tokenizer with ranks as ids, and all pairs of tokens that make a token as merges."""
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spelled = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        tokens = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += [
            (spelled[left], spelled[right])
            for left, right in sorted(tokens, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    made = Tokenizer(BPE(vocab={spelled[token]: rank for token, rank in ranks.items()}, merges=merges))
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    names = [f"<|{_NAMES.get(id, f'reserved_{id}')}|>" for id in range(len(ranks), max(_NAMES) + 1)]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return made
