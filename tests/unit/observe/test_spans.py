"""Shares of time, on a clock that is moved by hand."""

import pytest

from sparring.observe.spans import Spans


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_overlap_and_waiting_are_named() -> None:
    clock = Clock()
    spans = Spans(clock)
    clock.now += 1  # nothing goes on
    with spans.span("generating"):
        clock.now += 2
        with spans.span("generating"), spans.span("training"):
            clock.now += 3
        clock.now += 1
    with spans.span("training"):
        clock.now += 3
    shares = spans.shares()
    assert shares == pytest.approx({"waiting": 0.1, "overlap": 0.3, "generating": 0.6, "training": 0.6})
    assert shares["generating"] + shares["training"] - shares["overlap"] + shares["waiting"] == pytest.approx(1.0)


def test_shares_start_over_within_an_activity() -> None:
    clock = Clock()
    spans = Spans(clock)
    with spans.span("training"):
        clock.now += 5
        assert spans.shares()["training"] == 1.0
        clock.now += 1
    clock.now += 3
    assert spans.shares() == pytest.approx({"waiting": 0.75, "overlap": 0.0, "training": 0.25})


def test_no_time_no_shares() -> None:
    assert Spans(Clock()).shares() == {"waiting": 0.0, "overlap": 0.0}


def test_an_activity_ends_with_an_error_too() -> None:
    clock = Clock()
    spans = Spans(clock)
    with pytest.raises(KeyError), spans.span("training"):
        raise KeyError
    clock.now += 1
    assert spans.shares() == {"waiting": 1.0, "overlap": 0.0}
