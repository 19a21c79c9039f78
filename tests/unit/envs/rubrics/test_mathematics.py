"""Right answers that math-verify reads, and what it would take for one."""

from __future__ import annotations

import pytest

from sparring.envs.rubrics.mathematics import equal, unread

READ = {
    r"\frac{1}{2}": (["0.5", "1/2", "½"], ["1", "2", r"\frac{2}{1}"]),
    "1{,}000": (["1000", "1,000", "1 000"], ["1", "0", "000"]),
    "1 000": (["1000", r"1\,000"], ["1", "0"]),
    "(1, 2)": ([r"\left(1,2\right)"], ["1", "2", "(2,1)", "[1,2]", "(1,2,3)"]),
    r"\$18": (["18", "$18", r"\$18.00"], ["8", "1", r"\$81"]),
    "3 1/2": (["3.5", "7/2", r"3\frac{1}{2}"], ["3", "1/2", "2"]),
    "x=2 or x=3": (["2, 3", "x = 3 or x=2"], ["2", "x=3"]),
    r"0.8\overline{3}": (["5/6"], ["0.8", "3"]),
    "1e5": (["100000", "10^5"], ["1", "5"]),
    r"3\text{ cm}^2": (["3"], ["2", "9"]),
    r"\binom{5}{2}": (["10"], ["5", "2"]),
    "90°": (["90"], ["0"]),
    "sqrt(2)": ([r"\sqrt{2}", "√2"], ["2"]),
    "2516_8": (["2516"], ["8"]),
    r"\text{(B)}": (["B"], ["A"]),
}
"""A right answer: others that are equal, and values that only share a piece of it."""


@pytest.mark.parametrize("gold", READ)
def test_a_right_answer_itself_counts_and_a_piece_of_it_does_not(gold: str) -> None:
    right, wrong = READ[gold]
    assert unread(gold) == ""
    for answer in (gold, *right):
        assert equal(f"It is $\\boxed{{{answer}}}$.", gold) and equal(answer, gold), answer
    for answer in wrong:
        assert not equal(f"It is $\\boxed{{{answer}}}$.", gold) and not equal(answer, gold), answer


@pytest.mark.parametrize(
    ("gold", "said"),
    [("1/0", "divides by zero"), ("12 34", "side by side"), ("2024-01-05", "begin with 0"), ("1_000", "begin with 0"),
     ("0x1F", "product with 0"), ("true", "nothing"), ("1..2", "nothing"), ("", "nothing")],
)  # fmt: skip
def test_a_right_answer_read_in_part_is_reported(gold: str, said: str) -> None:
    assert said in unread(gold)
