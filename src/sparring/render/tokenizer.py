"""A checkpoint's tokenizer without transformers: the `tokenizers` library reads tokenizer.json.

`FileTokenizer` satisfies the tokenizer protocol of the `renderers` library (`renderers.base.Tokenizer`), so the
hand-written renderers of that library run in a process without torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sparring.errors import BadInput, boundary, refusal
from sparring.render.control import MARK, ControlTokens
from sparring.render.encoding import TextEncoder

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

# Headers, tool lists and the questions of a group are encoded again and again; long texts are not worth the memory.
_REMEMBERED_TEXTS = 1024
_REMEMBERED_CHARACTERS = 4096


class FileTokenizer:
    """Tokenizer: text <-> ids as a checkpoint's folder defines it. An added token written in a text becomes its id,
    unless it contains a `MARK`.

    Attributes:
        name_or_path: folder of the checkpoint.
        special: text of each named special token: `eos_token` -> `<|im_end|>`.
    """

    def __init__(self, backend: Tokenizer, special: Mapping[str, str], name_or_path: str) -> None:
        self._backend = backend
        self.encoder = TextEncoder(backend)
        self.special = dict(special)
        self.name_or_path = name_or_path
        self._remembered = functools.lru_cache(_REMEMBERED_TEXTS)(self._ids)

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the checkpoint's end token; None if the checkpoint names no end token."""
        return self._named_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """Return the id of the token for unknown text; None if the checkpoint names no such token."""
        return self._named_id("unk_token")

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def longest(self) -> int:
        """Return an upper bound of the bytes of a token."""
        return max(len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Return the added tokens as text -> id. No text is ever split inside an added token."""
        return {token.content: id for id, token in self._backend.get_added_tokens_decoder().items()}

    @functools.cached_property
    def control(self) -> ControlTokens:
        """Return the tokenizer's `ControlTokens`, which tell added tokens from text that looks like them."""
        return ControlTokens(self._backend)

    @functools.cached_property
    def decodes_bytes(self) -> bool:
        """Return whether the tokenizer is byte-level: the text of a sequence of ids is the concatenation of their
        bytes."""
        decoder = json.loads(self._backend.to_str()).get("decoder")
        return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Bytes of each id of a byte-level tokenizer. A token with a letter outside `byte_letters` is plain text."""
        letters = byte_letters()
        return {
            id: bytes(map(letters.__getitem__, token)) if letters.keys() >= set(token) else token.encode()
            for token, id in self._backend.get_vocab(with_added_tokens=True).items()
        }

    @property
    def all_special_tokens(self) -> list[str]:
        """Return the added tokens that decoding may skip."""
        return [t.content for t in self._backend.get_added_tokens_decoder().values() if t.special]

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Encode a text. A lone surrogate, which UTF-8 cannot carry, is read as a question mark."""
        ids = self._remembered if len(text) <= _REMEMBERED_CHARACTERS else self._ids
        return list(ids(text, add_special_tokens))

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode ids. Ids outside the vocabulary decode to nothing, broken UTF-8 to replacement characters."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id, possibly part of a character. For a tokenizer that is not byte-level: the bytes
        of the id's text. An id outside the vocabulary has no bytes."""
        return self._bytes.get(token, b"") if self.decodes_bytes else self.decode(token).encode()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of several tokens; `unk_token_id` for a token outside the vocabulary."""
        if isinstance(tokens, str):
            id = self._backend.token_to_id(tokens)
            return self.unk_token_id if id is None else id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def as_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return self._backend.to_str()

    def _ids(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        text = _utf8(text)
        if MARK in text:
            return tuple(self.control.encode(text))
        if not add_special_tokens:
            return tuple(self.encoder.encode(text))
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _named_id(self, name: str) -> int | None:
        token = self.special.get(name)
        return None if token is None else self._backend.token_to_id(token)


def byte_letters() -> dict[str, int]:
    """Return the letters with which byte-level vocabularies spell the 256 bytes: printable Latin-1 bytes stand for
    themselves, the others are numbered from U+0100 (GPT-2, `bytes_to_unicode`)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


def load_tokenizer(path: str | Path) -> FileTokenizer:
    """Read tokenizer.json, tokenizer_config.json and special_tokens_map.json of a checkpoint folder.

    Raises:
        BadInput: the folder or tokenizer.json is missing or does not parse.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        got = "a folder without one" if folder.is_dir() else "no such folder"
        raise refusal(str(file), "a tokenizer.json (a fast tokenizer)", got, "give a Hugging Face checkpoint folder")
    with boundary(BadInput, str(file), "a tokenizer of the tokenizers library", "repair the checkpoint"):
        backend = Tokenizer.from_file(str(file))
    backend.no_padding()
    backend.no_truncation()
    named = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    special = {name: text for name in SPECIAL_NAMES if (text := _text(named.get(name))) is not None}
    return FileTokenizer(backend, special, str(folder))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint folder; return an empty one if the file does not exist.

    Raises:
        BadInput: the file is not a JSON object.
    """
    if not file.is_file():
        return {}
    with boundary(BadInput, str(file), "JSON", "repair the checkpoint"):
        value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise refusal(str(file), "a JSON object", type(value).__name__, "repair the checkpoint")
    return value


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is given as a text or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
