"""`tests/golden/vectors.jsonl`, the file for other frameworks, has what the references give."""

import json

import numpy as np
import pytest
from golden import credit, policy, shaping
from golden.dump import FILE, vectors


def same(one, other) -> bool:
    """Compare plain data; numbers to 1e-9, for `exp` and `log` differ between machines in their last bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.isclose(one, other, rtol=1e-9, atol=1e-12)) if isinstance(one, float) else one == other


def written() -> list:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def test_the_file_has_every_name() -> None:
    names = {case.get("rule") or case["name"].partition("/")[0] for case in written()}
    assert names >= {*credit.REFERENCES, *shaping.REFERENCES, *(name for _, name in policy.names())}


@pytest.mark.slow
def test_the_file_is_what_the_references_give() -> None:
    assert same(json.loads(json.dumps(list(vectors()))), written())
