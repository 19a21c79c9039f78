"""Frames between the parent and a box, and the results in them. `inner.boxes` describes the wire form."""

from __future__ import annotations

import asyncio
import codecs
import json
import struct
from collections.abc import Mapping
from typing import Any

from sparring.types import ExecResult


def send(writer: asyncio.StreamWriter, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Write a frame."""
    text = json.dumps(header).encode()
    writer.write(struct.pack("<II", len(text), len(body)) + text)
    writer.write(body)


def result_of(header: Mapping[str, Any], body: bytes) -> ExecResult:
    """Return the result in an answer."""
    split = header["stdout"]
    return ExecResult(
        exit_code=header["exit"],
        stdout=_text(body[:split], cut=header["truncated"]),
        stderr=_text(body[split:], cut=header["truncated"]),
        wall_s=header["wall"],
        timed_out=header["timed_out"],
        out_of_memory=header["out_of_memory"],
        truncated=header["truncated"],
    )


def _text(data: bytes, *, cut: bool) -> str:
    """Decode UTF-8 with replacement; drop a character that the byte limit cut in two."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not cut)
