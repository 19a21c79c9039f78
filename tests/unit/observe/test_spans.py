"""Shares of time, on a clock that is moved by hand."""

import pytest

from sparring.observe.spans import Spans, shares, shares_by_cause


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
    found = shares(spans.lap())
    assert found == pytest.approx({"waiting": 0.1, "overlap": 0.3, "generating": 0.6, "training": 0.6})
    assert found["generating"] + found["training"] - found["overlap"] + found["waiting"] == pytest.approx(1.0)


def test_shares_start_over_within_an_activity() -> None:
    clock = Clock()
    spans = Spans(clock)
    with spans.span("training"):
        clock.now += 5
        assert shares(spans.lap())["training"] == 1.0
        clock.now += 1
    clock.now += 3
    assert shares(spans.lap()) == pytest.approx({"waiting": 0.75, "overlap": 0.0, "training": 0.25})


def test_shares_of_no_time_are_zero() -> None:
    assert shares(Spans(Clock()).lap()) == {"waiting": 0.0, "overlap": 0.0}


def test_an_activity_ends_with_an_error_too() -> None:
    clock = Clock()
    spans = Spans(clock)
    with pytest.raises(KeyError), spans.span("training"):
        raise KeyError
    clock.now += 1
    assert shares(spans.lap()) == {"waiting": 1.0, "overlap": 0.0}


def test_every_idle_second_has_one_cause() -> None:
    clock = Clock()
    spans = Spans(clock)
    with spans.span("training"):
        clock.now += 2
        with spans.span("worlds"):
            clock.now += 3
            with spans.span("generating"):
                clock.now += 1
        spans.enter("saving")
        clock.now += 4
    clock.now += 6
    spans.leave("saving")
    clock.now += 4  # nothing goes on
    seconds = spans.lap()
    causes = [("worlds", "worlds"), ("saving", "disk")]
    engine = shares_by_cause(seconds, ("generating",), [*causes, ("training", "training")])
    assert engine == pytest.approx({"busy": 0.05, "worlds": 0.15, "disk": 0.5, "training": 0.1, "other": 0.2})
    trainer = shares_by_cause(seconds, ("training",), causes)
    assert trainer == pytest.approx({"busy": 0.5, "worlds": 0.0, "disk": 0.3, "other": 0.2})
    assert sum(engine.values()) == sum(trainer.values()) == pytest.approx(1.0)
    assert shares(seconds, ("training", "worlds")) == pytest.approx(
        {"training": 0.5, "worlds": 0.2, "overlap": 0.2, "waiting": 0.5}
    )
    assert spans.lap() == {} and set(shares_by_cause({}, (), causes).values()) == {0.0}
