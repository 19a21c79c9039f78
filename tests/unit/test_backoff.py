"""Pauses before retries."""

from __future__ import annotations

from sparring.backoff import LONGEST_PAUSE_S, retry_pause_s


def test_pauses_of_many_fill_the_interval_evenly() -> None:
    pauses = sorted(retry_pause_s(0.5, 3, seed) for seed in range(2000))
    assert pauses[0] >= 0 and pauses[-1] < 2.0
    assert all(abs(pause - 2.0 * place / 2000) < 0.08 for place, pause in enumerate(pauses))


def test_a_pause_hangs_on_what_is_tried_again_and_how_often() -> None:
    assert retry_pause_s(1.0, 1, 7) == retry_pause_s(1.0, 1, 7)
    assert len({retry_pause_s(1.0, 1, 7), retry_pause_s(1.0, 1, 8), retry_pause_s(0.5, 2, 7)}) == 3
    assert retry_pause_s(0.0, 5, 7) == 0.0


def test_a_pause_has_an_upper_bound() -> None:
    assert max(retry_pause_s(1.0, 50, seed) for seed in range(100)) < LONGEST_PAUSE_S
