"""Added tokens in text: control tokens of a format, told apart from text of messages that looks like them.

A chat template joins its own control tokens and the text of messages into one text. So the text of messages is marked
first: a mark is put inside every added token in this text. The template, or a renderer of the library, copies the
marks. When the text is encoded, a token with a mark inside is plain text, any other a control token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer


def _secret() -> str:
    """Draw a secret text that no author of a message can know. It never leaves the process, and no id depends on it.

    It contains no letters, since templates change case, and no character that JSON, XML or a URL escapes.
    """
    return f"^{secrets.randbits(96)}^"


MARK = _secret()
_SPLIT = _secret()


class ControlTokens:
    """The added tokens of one tokenizer, special or not, except tokens of blanks alone.

    Args:
        backend: the tokenizer. Its model and rules are shared, not copied.

    Attributes:
        ids: text -> id, without the unknown token (`unk_token`), since any text may be encoded as that token.
    """

    def __init__(self, backend: Tokenizer) -> None:
        tokens_by_id = backend.get_added_tokens_decoder()
        added = {id: token for id, token in tokens_by_id.items() if token.content.strip(" \t\r\n▁")}
        ids = {token.content: id for id, token in added.items()}
        unknown = getattr(backend.model, "unk_token", None)
        self.ids = {text: id for text, id in ids.items() if text != unknown}
        self._controls = set(self.ids.values())
        self._normalizer = backend.normalizer if any(token.normalized for token in added.values()) else None
        # without ids, an expression that never matches
        tokens = _any_of(ids) if ids else "(?!)"
        self._pattern = re.compile(f"{re.escape(MARK)}|(?:{tokens})(?!{re.escape(MARK)})")
        self._alias = {text: _secret() for text in ids}
        self._plain = _rename_tokens(backend, tokens_by_id.values(), self._alias)
        self._own_id = {
            self._plain.token_to_id(self._alias.get(t.content, t.content)): id for id, t in tokens_by_id.items()
        }
        self._split = self._plain.token_to_id(_SPLIT)

    def marked(self, text: str) -> str:
        """Return the text with a mark inside each added token that the text contains."""
        for _ in range(len(text)):  # a token may hold a shorter one, found when the longer one is broken
            before, text = text, self._pattern.sub(_break_token, text)
            if text == before:
                break
        if MARK in text or self._normalizer is None:
            return text
        hidden = self._pattern.search(self._normalizer.normalize_str(text))
        return MARK.join(text) if hidden else text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a marked text. A marked token is encoded as plain text, never as its own id."""
        wanted = sum(match[0] in self.ids for match in self._pattern.finditer(text))
        ids = self._encode(text, "")
        if sum(id in self._controls for id in ids) == wanted:
            return ids
        return self._encode(text, _SPLIT)  # a plain token has the same text: encode it in two halves

    def _encode(self, text: str, mark: str) -> list[int]:
        text = self._pattern.sub(lambda match: self._alias.get(match[0], mark), text)
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return [self._own_id.get(id, id) for id in ids if id != self._split]


def _break_token(match: re.Match[str]) -> str:
    text = match[0]
    return text if text == MARK else text[:1] + MARK + text[1:]


def _rename_tokens(backend: Tokenizer, tokens: Iterable[AddedToken], alias: dict[str, str]) -> Tokenizer:
    """Return a copy of the tokenizer with added tokens renamed, so that their own names are plain text."""
    plain = Tokenizer(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    renamed = [_like(token, alias.get(token.content, token.content)) for token in tokens]
    plain.add_tokens([*renamed, AddedToken(_SPLIT, normalized=False)])  # at once: each call prepares the search anew
    return plain


def _like(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of the texts. The expression is a prefix tree, so that
    thousands of texts are found as fast as one."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _expression(tree)


def _expression(tree: dict[str, Any]) -> str:
    ends = "" in tree
    branches = [re.escape(letter) + _expression(below) for letter, below in sorted(tree.items()) if letter]
    if not branches:
        return ""
    if len(branches) == 1 and not ends:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}"
