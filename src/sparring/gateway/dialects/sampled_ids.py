"""Sampled ids as clients see them: the number of reasoning tokens, and OpenAI's list of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparring.gateway.dialects.dialect import BytesOf
from sparring.reply import SampledReply


def thought_tokens(replies: Sequence[SampledReply]) -> int | None:
    """Return the number of reasoning tokens of all replies, or None if the format of one does not mark them."""
    counts = [reply.reasoning_tokens for reply in replies if reply.reasoning_tokens is not None]
    return sum(counts) if len(counts) == len(replies) else None


def write_logprobs(reply: SampledReply, bytes_of: BytesOf) -> list[dict[str, Any]]:
    """Return each id of a reply with its text, log-probability and bytes. The text of an incomplete character is
    U+FFFD; the bytes of all ids together are the bytes of the reply."""
    listed = []
    for token, logprob in zip(reply.tokens, reply.logprobs, strict=bool(reply.logprobs)):
        data = bytes_of(token)
        text = data.decode("utf-8", "replace")
        listed.append({"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []})
    return listed
