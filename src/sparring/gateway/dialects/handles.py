"""Handles: opaque strings that a client keeps and sends back, such as a signature; each names a reply."""

from __future__ import annotations

import base64
import binascii
import hashlib

DIGEST_BYTES = 6

EMPTY = "empty"
"""Suffix of an item's id, instead of a number, for an empty item that is no piece of its reply."""


def handle_of(reply: str) -> str:
    """Return the handle of a reply, in characters that JSON, URLs and headers allow."""
    data = reply.encode()
    return base64.urlsafe_b64encode(_digest(data) + data).decode()


def reply_named(handle: object) -> str:
    """Return the id of the reply that a handle names; empty for any other value, such as another vendor's signature."""
    if not isinstance(handle, str) or not handle:
        return ""
    try:
        data = base64.b64decode(handle.encode(), altchars=b"-_", validate=True)
        digest, reply = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return reply.decode() if digest == _digest(reply) else ""
    except (binascii.Error, ValueError):
        return ""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"sparring").digest()
