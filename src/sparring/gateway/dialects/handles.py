"""Handles: texts that a client keeps and sends back unread, each of which names a reply."""

from __future__ import annotations

import base64
import binascii
import hashlib

DIGEST_BYTES = 6

EMPTY = "empty"
"""Stands for the number of an item that is no piece of its reply, and has no text."""


def sealed(reply: str) -> str:
    """Return the handle of the reply with this id, in letters that JSON, URLs and headers carry as they are."""
    data = reply.encode()
    return base64.urlsafe_b64encode(_digest(data) + data).decode()


def unsealed(handle: object) -> str:
    """Return the id of the reply that a handle names; empty for anything else, such as another vendor's signature."""
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
