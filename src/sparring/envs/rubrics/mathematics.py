"""Equality of two mathematical answers, decided by the library `math-verify`. For `worker` alone: a comparison may
never end.

The library's own time-outs are signals, which work on a main thread only; they are off, because the worker has its
limit.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from sparring.envs.rubrics.numbers import mixed, plain

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

SIGNS = {
    "°": r"^\circ", "²": "^2", "³": "^3", "π": r"\pi ", "√": r"\sqrt", "∞": r"\infty ", "∅": r"\emptyset ",
    "∪": r"\cup ", "×": r"\times ", "÷": "/", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "−": "-", "€": "", "£": "",
}  # fmt: skip
"""Signs that the library reads in LaTeX alone, or not at all."""

_EXPONENT = re.compile(r"(?<=\d)[eE]([-+]?\d{1,9})(?![\w.])")
_NAMED = re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|ln|exp|pi)(?![A-Za-z])")
_APART = re.compile(r"(?<![A-Za-z_^}\d.])\d+(?:\.\d+)?\s+\d")
_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_LEADING_ZERO = re.compile(r"(?<![\d.,])0\d")
_DIGITS = re.compile(r"\d+")
_NOTED = re.compile(r"(?:_\s*\{?|\\(?:text|mathrm|mbox)\s*\{[^{}]*\}\s*\^\s*\{?)\s*$")
"""Beginnings of digits that need not count: the base of a numeral, the power of a unit."""
_ABSORBED = re.compile(r"(?<![\d.])0\*|(?<!\*)\*0(?![\d.])")


def equal(text: str, target: str, digits: int) -> bool:
    """Return True if the answer in `text` equals `target`.

    Args:
        text: an answer: its last boxed expression counts, else its last formula or number. One that is nothing but an
            expression counts as a whole too.
        target: the right answer, LaTeX or plain.
        digits: after the point, that must agree where one of the two is a decimal number.

    Raises:
        ValueError: the target is nothing that can be compared.
    """
    wanted = list(right(target))
    if verify(wanted, _parsed(text), float_rounding=digits, timeout_seconds=None):
        return True
    alone = "\n" not in text and len(text) <= 2 * len(target) + 40 and not _is_marked(text)
    return alone and bool(verify(wanted, _whole(text), float_rounding=digits, timeout_seconds=None))


def unread(target: str) -> str:
    """Say what of a right answer the library does not read; "" where it reads it whole.

    What is read counts: with another digit in its place the expression is another one. Two numbers with blanks between
    them and numbers that begin with 0 are read as sums and products, and are no formula.
    """
    text = _rewritten(target)
    if _APART.search(text) or _LEADING_ZERO.search(text):
        return "digits that stand side by side, or begin with 0"
    try:
        expressions = right(target)
    except ValueError:
        return "nothing that math-verify reads"
    if all(isinstance(each, str) for each in expressions):
        return "nothing that math-verify reads"
    if any(word in str(expressions[0]) for word in ("zoo", "nan")):
        return "no number: it divides by zero"
    if _ABSORBED.search(read := str(expressions[0])):
        return "a product with 0, in which nothing else counts"
    for digits in _DIGITS.finditer(text):
        if not _NOTED.search(text, 0, digits.start()) and all(_with_other(text, digits, by) == read for by in (1, 2)):
            return f"{digits[0]!r}, which does not count"
    return "" if equal(f"\\boxed{{{target}}}", target, 6) else "something that does not equal itself"


def _with_other(text: str, digits: re.Match[str], by: int) -> str:
    """Return what is read of a text with other digits in the place of these."""
    other = str((int(digits[0][0]) + by - 1) % 9 + 1) + digits[0][1:]
    changed = _whole(text[: digits.start()] + other + text[digits.end() :])
    return str(changed[0]) if changed else ""


@functools.lru_cache(maxsize=4096)
def right(target: str) -> tuple[Any, ...]:
    """Return the target, parsed.

    Raises:
        ValueError: it is nothing that can be compared.
    """
    parsed = _parsed(target) if _is_marked(_rewritten(target)) else _whole(target)
    if not parsed:
        raise ValueError(f"an answer that math-verify can read, got {target[:80]!r}")
    return tuple(parsed)


def _is_marked(text: str) -> bool:
    return "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text


def _whole(text: str) -> list[Any]:
    """Return the expression that a text is."""
    return _parsed(text if _is_marked(_rewritten(text)) else f"\\boxed{{{text}}}")


def _parsed(text: str) -> list[Any]:
    extractions = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answers: list[Any] = parse(_rewritten(text), extractions, parsing_timeout=None)
    return answers


def _rewritten(text: str) -> str:
    """Return a text as the library reads it: numbers written `plain`, signs as LaTeX."""
    text = mixed(plain(text), r"{units}\frac{{{over}}}{{{under}}}")
    if not text.isascii():
        text = "".join(SIGNS.get(character, character) for character in text)
    text = _NAMED.sub(r"\\\1 ", _EXPONENT.sub(r" \\times 10^{\1}", text))
    return _ROOT.sub(r"\\sqrt{\1}", text)
