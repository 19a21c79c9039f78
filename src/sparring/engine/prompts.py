"""Prompts that a server remembers by conversation, so that clients send only the new ids. Torch-free.

A prompt usually begins with the conversation so far: the last prompt and its reply. The server remembers these ids, the
client their number and digest. The client sends number, digest and the new ids. A server that has no such ids, because
it restarted or forgot the conversation, refuses the request, and the client sends the whole prompt. So a prompt is
restored exactly or not at all.

The digest is xxh3-128 of the ids as text, each followed by a comma; the client writes this text for the request anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import xxhash

from sparring.engine import wire

MOST_TOKENS = 1 << 21
"""Maximum number of ids that a server remembers; each needs up to 36 bytes."""

MOST_CONVERSATIONS = 1 << 16
"""Maximum number of conversations that a client remembers; each needs about 300 bytes."""

Tokens = tuple[int, ...]


class KnownPrompt(NamedTuple):
    """Whole prompt of a request, its reply if there is one already, and the digest of all these ids."""

    tokens: Tokens
    digest: xxhash.xxh3_128
    reply: Tokens = ()

    @property
    def length(self) -> int:
        """Number of ids."""
        return len(self.tokens) + len(self.reply)


class KnownPrompts:
    """Ids that a server remembers, by conversation, at most `most_tokens` in all. The conversations with the oldest
    last turn are forgotten first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._known: dict[str, KnownPrompt] = {}
        self.num_tokens = 0

    def whole(self, conversation: str | None, prefix: wire.KnownPrefix | None, tokens: Tokens) -> KnownPrompt:
        """Return the whole prompt of a request: the ids of `prefix`, if any, then `tokens`. Raises UnknownPrefix if
        other ids are remembered for this conversation, or none."""
        if prefix is None:
            return KnownPrompt(tokens, xxhash.xxh3_128(_text(tokens)))
        known = self._known.get(conversation or "")
        if known is None or known.length != prefix.tokens or known.digest.hexdigest() != prefix.digest:
            raise wire.UnknownPrefix(
                f"conversation {conversation}: expected the ids that this server remembers, got a prefix of "
                f"{prefix.tokens} others; send the whole prompt"
            )
        # one copy of the long part: each touches the count of every id
        return KnownPrompt(known.tokens + (known.reply + tokens), _digest(known.digest, tokens))

    def remember(self, conversation: str | None, prompt: KnownPrompt, reply: Tokens = ()) -> None:
        """Remember a prompt and its reply: the conversation's next prompt may begin with them."""
        if conversation is None:
            return
        self.forget(conversation)
        self._known[conversation] = known = KnownPrompt(prompt.tokens, _digest(prompt.digest, reply), reply)
        self.num_tokens += known.length
        while self.num_tokens > self._most:
            self.forget(next(iter(self._known)))

    def forget(self, conversation: str) -> None:
        """Forget a conversation."""
        known = self._known.pop(conversation, None)
        self.num_tokens -= 0 if known is None else known.length


class SentPrompt(NamedTuple):
    """Ids that a client sent: their number, the length of their text in bytes, and its digest."""

    tokens: int
    length: int
    digest: xxhash.xxh3_128


class SentPrompts:
    """Numbers and digests of the ids that a client's server remembers, by conversation."""

    def __init__(self) -> None:
        self._sent: dict[str, SentPrompt] = {}

    def shortened(self, form: wire.GenerateForm) -> tuple[wire.GenerateForm, SentPrompt]:
        """Return the form of a request, and number and digest of its whole prompt. If the prompt begins with ids that
        the server remembers, the form has only the other ids."""
        text, prefix, start = _text(form.tokens), None, 0
        sent = self._sent.get(form.conversation or "")
        digest = xxhash.xxh3_128()
        if sent is not None and sent.length <= len(text):
            digest.update(text[: sent.length])
            start = sent.length
            if digest.digest() == sent.digest.digest():
                prefix = wire.KnownPrefix(tokens=sent.tokens, digest=sent.digest.hexdigest())
        digest.update(text[start:])
        new = text[start:] if prefix is not None else text
        short = msgspec.structs.replace(form, tokens=msgspec.Raw(b"[%b]" % new[:-1]), prefix=prefix)
        return short, SentPrompt(len(form.tokens), len(text), digest)

    def remember(self, conversation: str | None, prompt: SentPrompt, reply: Tokens = ()) -> None:
        """Record that the server remembers a prompt and its reply."""
        if conversation is None:
            return
        text = _text(reply)
        digest = prompt.digest.copy()
        digest.update(text)
        self._sent.pop(conversation, None)
        self._sent[conversation] = SentPrompt(prompt.tokens + len(reply), prompt.length + len(text), digest)
        if len(self._sent) > MOST_CONVERSATIONS:
            del self._sent[next(iter(self._sent))]

    def forget(self, conversation: str | None) -> None:
        """Forget a conversation."""
        self._sent.pop(conversation or "", None)


def _text(tokens: Tokens) -> bytes:
    return msgspec.json.encode(tokens)[1:-1] + b"," if tokens else b""


def _digest(before: xxhash.xxh3_128, tokens: Tokens) -> xxhash.xxh3_128:
    digest = before.copy()
    digest.update(_text(tokens))
    return digest
