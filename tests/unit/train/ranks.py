"""Ranks of trainers as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sparring.train.gloo import GlooRanks, Meeting


def in_ranks(count: int, work: Callable[[GlooRanks], Any]) -> list[Any]:
    """`work(ranks)` of every rank, each on a thread."""
    meeting = Meeting()
    with ThreadPoolExecutor(count) as pool:
        made = [pool.submit(GlooRanks, rank, count, meeting.address, 30.0) for rank in range(count)]
        return list(pool.map(work, [each.result() for each in made]))
