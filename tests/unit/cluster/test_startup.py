"""What is told while processes start."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from sparring.cluster.startup import starting
from sparring.observe.wait_reports import telling_waits


def test_a_start_is_told_as_it_goes_on() -> None:
    told = list[tuple[str, Mapping[str, Any]]]()
    with starting("engine", 2, lambda text, facts: told.append((text, facts)), on=3) as ready:
        ready(1, "b")
        ready(0, "a")
    texts = [text.rpartition(", ")[0] or text for text, _ in told]
    assert texts[:3] == ["starting 2 engines on 3 nodes", "engine 1 is ready (b", "engine 0 is ready (a"]
    assert told[-1][0].startswith("2 engines ready after ") and told[-1][0].endswith(" s")
    assert [facts.get("engine") for _, facts in told] == [None, 1, 0, None]


@pytest.mark.parametrize("kind", ["engine", "rank"])
def test_one_that_is_late_is_named(kind: str) -> None:
    told, waits, late = list[str](), list[str](), threading.Event()

    def hear(sentence: str) -> None:
        waits.append(sentence)
        late.set()

    with telling_waits(hear, after_s=0.01), pytest.raises(RuntimeError):
        with starting(kind, 2, lambda text, facts: told.append(text)) as ready:
            ready(0, "here")
            late.clear()
            assert late.wait(30)
            raise RuntimeError("it does not start")
    assert waits[-1].startswith(f"waiting for {kind}s to start: 1 since ")
    assert told[0] == f"starting 2 {kind}s" and not any("after" in text for text in told)
