"""The check of `tests/data/check_gsm8k.py` on rows of our own; its figures on the real file stand in
docs/rewards.md."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "data" / "check_gsm8k.py"
ROWS = [
    (
        "Ann has 3 boxes of 24 pens at $2 each. What are they worth?",
        "24*3=<<24*3=72>>72 pens.\n72*$2=$<<72*2=144>>144.\n#### 144",
    ),
    ("A house costs 120,000 and gains 4,500. What is it worth?", "120,000+4,500=124,500.\n#### 124,500"),
    ("Tom had 5 apples and ate 5. How many are left?", "5-5=<<5-5=0>>0\n#### 0"),
    ("What is 3 less 10?", "3-10=-7\n#### -7"),
    ("How much is half of 7?", "7/2=<<7/2=3.5>>3.5\n#### 3.5"),
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_gsm8k", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["solution", "boxed"])
def test_right_answers_are_worth_1_and_changed_ones_0(script: ModuleType, tmp_path: Path, form: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in ROWS))
    found = asyncio.run(script.figures(file, "number", form))
    assert found == {"right": 5, "right_at_1": 5, "wrong": 9 * (3 + 6 + 1 + 1 + 2), "wrong_above_0": 0}


def test_every_digit_is_changed_to_every_other(script: ModuleType) -> None:
    assert sorted(script.changed("-1,0"))[:3] == ["-0,0", "-1,1", "-1,2"]
    assert len(set(script.changed("-1,0")) - {"-1,0"}) == 18
