"""Equality of mathematical answers by the library `math-verify`, for use in `worker` only: a comparison may never end.

The library's own time-outs use signals, which work on a main thread only; they are off, because the worker has a limit.
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
"""Signs that the library reads only in LaTeX, or not at all."""

DIGITS = 6
"""Digits after the point that must agree if one of two numbers is a decimal."""

_EXPONENT = re.compile(r"(?<=\d)[eE]([-+]?\d{1,9})(?![\w.])")
_NAMED = re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|ln|exp|pi)(?![A-Za-z])")
_APART = re.compile(r"(?<![A-Za-z_^}\d.])\d+(?:\.\d+)?\s+\d")
_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_LEADING_ZERO = re.compile(r"(?<![\d.,])0\d")
_DIGITS = re.compile(r"\d+")
_NOTED = re.compile(r"(?:_\s*\{?|\\(?:text|mathrm|mbox)\s*\{[^{}]*\}\s*\^\s*\{?)\s*$")
"""Text before digits that need not count: those of a numeral's base or a unit's power."""
_ABSORBED = re.compile(r"(?<![\d.])0\*|(?<!\*)\*0(?![\d.])")


def equal(text: str, target: str) -> bool:
    """Return True if the answer in `text` equals `target`.

    Args:
        text: answer. Its last boxed expression counts, else its last formula or number; an answer that is one
            expression counts as a whole too.
        target: right answer, LaTeX or plain.

    Raises:
        ValueError: the target cannot be parsed.
    """
    expected = list(right(target))
    if verify(expected, _parse(text), float_rounding=DIGITS, timeout_seconds=None):
        return True
    is_short = "\n" not in text and len(text) <= 2 * len(target) + 40 and not _is_marked(text)
    return is_short and bool(verify(expected, _parse_as_one(text), float_rounding=DIGITS, timeout_seconds=None))


def unread(target: str) -> str:
    """Return why a right answer cannot be read completely; "" if it can.

    A part is read if changing one of its digits changes the expression. Numbers separated by blanks and numbers with a
    leading zero are refused, because the library reads them as products and sums.
    """
    text = _rewrite(target)
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
        if not _NOTED.search(text, 0, digits.start()) and all(_with_digits(text, digits, by) == read for by in (1, 2)):
            return f"{digits[0]!r}, which does not count"
    return "" if equal(f"\\boxed{{{target}}}", target) else "something that does not equal itself"


def _with_digits(text: str, digits: re.Match[str], by: int) -> str:
    """Parse the text with the match's first digit moved on by `by` (after 9 comes 1); "" if that fails."""
    other = str((int(digits[0][0]) + by - 1) % 9 + 1) + digits[0][1:]
    changed = _parse_as_one(text[: digits.start()] + other + text[digits.end() :])
    return str(changed[0]) if changed else ""


@functools.lru_cache(maxsize=4096)
def right(target: str) -> tuple[Any, ...]:
    """Return the parsed target; `ValueError` if it cannot be parsed."""
    parsed = _parse(target) if _is_marked(_rewrite(target)) else _parse_as_one(target)
    if not parsed:
        raise ValueError(f"an answer that math-verify can read, got {target[:80]!r}")
    return tuple(parsed)


def _is_marked(text: str) -> bool:
    return "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text


def _parse_as_one(text: str) -> list[Any]:
    return _parse(text if _is_marked(_rewrite(text)) else f"\\boxed{{{text}}}")


def _parse(text: str) -> list[Any]:
    extractions = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answers: list[Any] = parse(_rewrite(text), extractions, parsing_timeout=None)
    return answers


def _rewrite(text: str) -> str:
    """Return a text in the library's syntax: numbers as `plain` writes them, signs as LaTeX."""
    text = mixed(plain(text), r"{units}\frac{{{over}}}{{{under}}}")
    if not text.isascii():
        text = "".join(SIGNS.get(character, character) for character in text)
    text = _NAMED.sub(r"\\\1 ", _EXPONENT.sub(r" \\times 10^{\1}", text))
    return _ROOT.sub(r"\\sqrt{\1}", text)
