"""Numbers as people and LaTeX write them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from sparring.envs.rubrics.numbers import final, number, whole_number

WHOLE = {
    "1/2": [r"\frac{1}{2}", r"\dfrac{1}{2}", r"\frac12", r"\frac 1 2", "½", "0.5", r"$\frac{1}{2}$", r"\boxed{\frac{1}{2}}"],
    "-3/4": [r"-\frac{3}{4}", r"\frac{-3}{4}", "−3/4", "-.75"],
    "7/2": ["3 1/2", r"3\frac{1}{2}", "3½", "3.50"],
    "5/6": [r"0.8\overline{3}"],
    "1000": ["1{,}000", "1,000", "1 000", r"1\,000", "1\u2009000", "1\u00a0000", r"\(1000\)", r"1,\!000", "1e3", "10^3", "1000."],
    "18": [r"\$18", "$18", "€18", "18€", r"18\%", "18%", "18.00", r"$$18$$"],
    "6020": [r"6.02 \times 10^{3}", r"6.02\cdot 10^3", "6.02e3"],
    "1024": ["2^{10}", "2^10"],
}  # fmt: skip
PART = ["(1, 2)", "1, 2", "12 34", "1/0", "N/A", "nan", "", "5 cm", "5x", "2pi", "5!", "x=5", "1:2", "1,5", "1.234,56", "x^2", "1_000",
        "3 and 4", "#### 18", "1e999", "2^{9999}", r"\text{18}", "(5)"]  # fmt: skip


def test_a_number_is_read_completely_or_not_at_all() -> None:
    """And what is read whole is read the same at the end of a sentence."""
    for value, written in WHOLE.items():
        for text in written:
            assert whole_number(text) == Fraction(value), text
            assert number(f"Of 7 parts it is {text}") == Fraction(value), text
    assert [text for text in PART if whole_number(text) is not None] == []


@pytest.mark.parametrize(
    ("text", "expected"), [("18 cm^2", 18), ("x_1 is 5", 5), ("x^2", None), ("9^9^9", None), ("3 100", 3100)]
)
def test_exponents_and_indices_are_no_numbers_of_their_own(text: str, expected: int | None) -> None:
    assert number(text) == expected


def test_the_marked_part_of_a_worked_solution_is_its_answer() -> None:
    solutions = {"3 + 4 = <<3+4=7>>7\n#### 7": "7", r"so $\boxed{2}$, and $x = \boxed{\frac{1}{2}}$.": r"\frac{1}{2}",
                 r"\boxed{1": r"\boxed{1", "7": "7", "####": "####"}  # fmt: skip
    assert {text: final(text) for text in solutions} == solutions
