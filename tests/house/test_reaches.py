"""The lint of private reaches counts what tests use of the source's own, and nothing else."""

import pytest
from reaches import reaches
from structure import read


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from sparring.engine.cache.kv import _common, KvCache", 1),
        ("def test_it(engine):\n    assert engine._worker._runner", 2),
        ("def test_it(engine):\n    engine._worker = None", 1),
        ("class Own:\n    def __init__(self):\n        self._it = 1\n\ndef test_it():\n    assert Own()._it", 0),
        ("class Own:\n    def _count(self): ...\n\ndef test_it():\n    Own()._count()", 0),
        ("class Own(Base):\n    def it(self):\n        return self._inner", 0),
        ("import os\n\nos._exit(1)", 0),
        ("from torch import _C", 0),
        ("def test_it(row):\n    assert row._replace(a=1).__dict__", 0),
    ],
)
def test_a_reach_is_a_private_name_of_the_source(text: str, count: int) -> None:
    assert len(list(reaches(*read({"test_it.py": text})))) == count
