"""Equality of two mathematical answers, decided by the library `math-verify`. For `worker` alone: a comparison may
never end.

The library's own time-outs are signals, which work on a main thread only; they are off, because the worker has its
limit.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def equal(text: str, target: str, digits: int) -> bool:
    """Return True if the answer in `text` equals `target`.

    Args:
        text: an answer: its last boxed expression counts, else its last formula or number.
        target: the right answer, LaTeX or plain.
        digits: after the point, that must agree where one of the two is a decimal number.

    Raises:
        ValueError: the target is nothing that can be compared.
    """
    return bool(verify(list(right(target)), _parsed(text), float_rounding=digits, timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def right(target: str) -> tuple[Any, ...]:
    """Return the target, parsed.

    Raises:
        ValueError: it is nothing that can be compared.
    """
    parsed = _parsed(target if "$" in target or "\\boxed" in target else f"\\boxed{{{target}}}")
    if not parsed:
        raise ValueError(f"an answer that math-verify can read, got {target[:80]!r}")
    return tuple(parsed)


def _parsed(text: str) -> list[Any]:
    return parse(text, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()], parsing_timeout=None)
