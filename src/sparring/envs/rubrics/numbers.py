"""Numbers as people and LaTeX write them: `1,234.5`, `1{,}000`, `1 000`, `\\frac{1}{2}`, `3 1/2`, `6 \\times 10^{5}`.

Right answers and answers pass through the same `plain`, so both are read alike.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

LONGEST_EXPONENT = 400
"""Numbers beyond 10 to this power are rejected: as an exact fraction they would fill the memory."""

_NUMBER = re.compile(
    r"(?:(?<![\w).])[-−+]\s?)?[$€£]?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,9})?(?:/\d{1,30})?"
)
_RAISED = re.compile(r"[\^_]\s*\{?\s*$")
"""Start of an exponent or an index; its digits are not a number of the text."""

_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\\$"), ""),
    (re.compile(r"(?<=\d)(?:\{,\}|,\\! ?)(?=\d)"), ","),
    # blanks that only separate digits: \, \; \: \! "\ " ~ and their characters
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|~|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[dt]frac(?![A-Za-z])"), r"\\frac"),
)
_GROUPS = re.compile(r"(?<![\w.,^/])[1-9]\d{0,2}(?: \d{3})+(?![\w,/])")
_MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,30}) +(\d{1,30})/(\d{1,30})(?![\w/]|\.\d)")

_REPEATING = re.compile(r"(?<![\w.,])(\d{0,30})\.(\d{0,30})\\overline\{(\d{1,30})\}")
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*([-−+]?\d{1,30})\s*\}|\s(\d)|(\d))\s*(?:\{\s*(\d{1,30})\s*\}|(\d))")
_SCIENTIFIC = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|×|·|\*)\s*10\s*\^\s*(?:\{\s*([-−+]?\d{1,9})\s*\}|(\d))")
_POWER = re.compile(r"(?<![\w.,\\}/])(\d{1,4})\s*\^\s*(?:\{\s*(\d{1,4})\s*\}|(\d{1,4}))(?!\w)")
_AROUND = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("\\mathrm{", "}"), ("{", "}"))


def final(text: str) -> str:
    """Return the final answer of a worked solution: the text after `####` or in the last `\\boxed{}`, or the whole text
    if it has neither."""
    begin = text.rfind("\\boxed{")
    if begin >= 0:
        depth = 0
        for end in range(begin + len("\\boxed"), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[begin + len("\\boxed{") : end].strip()
    return text.rpartition("####")[2].strip() or text


def plain(text: str) -> str:
    """Return a text with the digits of each number joined: separators of groups of three, LaTeX spacing and dollar
    signs are removed, and `½` becomes ` 1/2`."""
    if not text.isascii():
        text = "".join(_fraction_character(character) for character in text)
    for pattern, instead in _PLAIN:
        text = pattern.sub(instead, text)
    text = _REPEATING.sub(_repeating_fraction, text) if "\\overline" in text else text
    return _GROUPS.sub(lambda match: match[0].replace(" ", ""), text)


def number(text: str) -> Fraction | None:
    """Return the last number of a text as an exact fraction: `1,234.5`, `-3`, `6.02e23`, `3/4`, `3 1/2`,
    `\\frac{1}{2}`. Exponents and indices are skipped, and a number that is raised to a power counts as no number: `18
    cm^2` gives 18, `x + 9^x` None."""
    text = _without_latex(text)
    for match in reversed(list(_NUMBER.finditer(text))):
        if not _RAISED.search(text, max(0, match.start() - 8), match.start()):
            return None if text[match.end() :].lstrip().startswith("^") else _value(match[0])
    return None


def whole_number(text: str) -> Fraction | None:
    """Return the number of a text that holds nothing but a number, a sign of currency or per cent, and LaTeX around
    them; else None."""
    text = text.strip()
    for _ in range(4):
        for begin, end in _AROUND:
            if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
                text = text[len(begin) : -len(end)].strip()
    text = re.sub(r"(?:\s*\\?[%$]|\s*[€£])?\.?$", "", _without_latex(text).strip())
    return _value(text) if _NUMBER.fullmatch(text) else None


def mixed(text: str, written: str) -> str:
    """Rewrite mixed numbers such as `3 1/2` by the template `written`, with the fields {units}, {over} and {under}."""

    def instead(match: re.Match[str]) -> str:
        units, over, under = map(int, match.groups())
        return written.format(units=units, over=over, under=under) if over < under else match[0]

    return _MIXED.sub(instead, text)


def _without_latex(text: str) -> str:
    """Return the text with fractions, powers of ten and powers of whole numbers in a form that `_NUMBER` matches."""
    text = plain(text)
    text = _SCIENTIFIC.sub(lambda match: f"e{match[1] or match[2]}".replace("−", "-"), text)
    text = _POWER.sub(_power, text)
    text = _FRACTION.sub(_fraction, text)
    return _MIXED.sub(_improper_fraction, text)


def _fraction(match: re.Match[str]) -> str:
    over, under = (next(filter(None, groups)) for groups in (match.groups()[:3], match.groups()[3:]))
    beside = match.string[: match.start()].rstrip()[-1:]
    return f"{' ' if beside.isdigit() else ''}{over}/{under}"


def _repeating_fraction(match: re.Match[str]) -> str:
    """Write a repeating decimal as a fraction: 0.8333... = (83 - 8) / 90."""
    fixed, all_of_it = match[1] + match[2], match[1] + match[2] + match[3]
    under = (10 ** len(match[3]) - 1) * 10 ** len(match[2])
    return f"\\frac{{{int(all_of_it) - int(fixed or 0)}}}{{{under}}}"


def _improper_fraction(match: re.Match[str]) -> str:
    units, over, under = map(int, match.groups())
    return f"{units * under + over}/{under}" if over < under else match[0]


def _power(match: re.Match[str]) -> str:
    base, exponent = int(match[1]), int(match[2] or match[3])
    return str(base**exponent) if base == 0 or len(match[1]) * exponent <= LONGEST_EXPONENT else match[0]


def _fraction_character(character: str) -> str:
    parts = unicodedata.normalize("NFKC", character).split("\u2044")
    return f" {parts[0]}/{parts[1]}" if len(parts) == 2 and all(map(str.isdigit, parts)) else character


def _value(text: str) -> Fraction | None:
    decimal, _, divisor = re.sub(r"[,$€£\s]", "", text).replace("−", "-").partition("/")
    value = Decimal(decimal)
    if abs(value.adjusted()) > LONGEST_EXPONENT or (divisor and not int(divisor)):
        return None
    return Fraction(value) / int(divisor or 1)
