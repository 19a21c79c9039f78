"""Sampled ids in the words of OpenAI's two dialects."""

from __future__ import annotations

from typing import Any

from sparring.gateway.dialects.dialect import BytesOf
from sparring.reply import SampledReply


def logprobs_written(reply: SampledReply, bytes_of: BytesOf) -> list[dict[str, Any]]:
    """Return each id of a reply with its log-probability, its bytes, and these as text. The bytes of all are those of
    the reply; a part of a character has no text of its own."""
    return [
        {
            "token": (data := bytes_of(token)).decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(data),
            "top_logprobs": [],
        }
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=True)
    ]
