"""What is waited for is told, while the thread that waits is blocked."""

from __future__ import annotations

import threading

from sparring.observe.wait_reports import awaited, telling_waits, waiting


def test_a_wait_is_told_while_its_thread_is_blocked_and_again_later() -> None:
    heard, lines = threading.Semaphore(0), list[str]()

    def tell(sentence: str) -> None:
        lines.append(sentence)
        heard.release()

    with telling_waits(tell, after_s=0.01), waiting("the check"), waiting("w.py:World.generate", lambda: "(task 3)"):
        assert heard.acquire(timeout=60) and heard.acquire(timeout=60)
    assert lines[:2] == ["waiting for w.py:World.generate (task 3) since 0 s (the check: 0 s)"] * 2


def test_many_short_waits_are_told_as_parts_of_the_whole() -> None:
    heard = threading.Event()
    with telling_waits(lambda sentence: heard.set(), after_s=0.01), waiting("the check"):
        while not heard.is_set():
            with waiting("w.py:World.generate"):
                assert awaited() == "w.py:World.generate"
        assert awaited() == "the check"
    assert awaited() == ""
