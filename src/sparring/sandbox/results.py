"""Results of commands, built from the box's reports of their ends."""

from __future__ import annotations

import codecs

from sparring.sandbox.connection import Told
from sparring.types import CommandEnd, ExecResult


def result_of(told: Told) -> ExecResult:
    """Return a command's result, or its output so far."""
    header = told.header
    end: CommandEnd = "running" if "look" in header and header["running"] else header["end"]
    out_head, out_tail, err_head, err_tail = told.parts
    out, out_missing = text_of(out_head, out_tail, header["totals"][0])
    err, err_missing = text_of(err_head, err_tail, header["totals"][1])
    return ExecResult(
        exit_code=-1 if end == "running" else header["exit"],
        stdout=out,
        stderr=err,
        wall_s=header["wall"],
        timed_out=end == "timed out",
        out_of_memory=end == "out of memory",
        truncated=bool(out_missing or err_missing),
        end=end,
        missing_bytes=out_missing + err_missing,
    )


def text_of(head: bytes, tail: bytes, total: int) -> tuple[str, int]:
    """Return a stream's text, UTF-8 with replacement, and the number of bytes that are missing between head and tail.
    A character that the limit cut in two is missing whole."""
    missing = total - len(head) - len(tail)
    if missing <= 0:
        return (head + tail).decode("utf-8", "replace"), 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    first = decoder.decode(head)
    missing += len(decoder.getstate()[0])
    cut = next((index for index, byte in enumerate(tail[:3]) if byte & 0xC0 != 0x80), min(3, len(tail)))
    return f"{first}\n[{missing + cut} bytes missing]\n{tail[cut:].decode('utf-8', 'replace')}", missing + cut
