"""A wait for code that blocks says what it waits for, and ends at its limit."""

from __future__ import annotations

import signal
import threading

from refusals import refused_at

from sparring.observe.waiting import waiting


def test_a_wait_says_what_it_waits_for_while_the_thread_is_blocked() -> None:
    heard, lines = threading.Event(), list[str]()

    def said(sentence: str) -> None:
        lines.append(sentence)
        heard.set()

    with waiting("w.py:World: generate", "rollout.timeouts.open_s", 300.0, after_s=0.01, said=said):
        assert heard.wait(60)
    with waiting("nothing", said=said):
        pass
    assert lines == ["waiting for w.py:World: generate since 0.01 s (rollout.timeouts.open_s = 300 bounds it)"]


def test_a_limit_ends_code_that_blocks_and_leaves_no_alarm() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with (
        refused_at("w.py:World: generate", "raise rollout.timeouts.open_s"),
        waiting("w.py:World: generate", "rollout.timeouts.open_s", 0.01),
    ):
        threading.Event().wait()
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
