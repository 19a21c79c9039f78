"""Measurements of an engine: latencies of requests and counts of tokens. Torch-free. The engine's thread writes them,
any thread may read."""

from __future__ import annotations

import time
from typing import Protocol

from sparring.engine.prometheus import Histogram
from sparring.engine.scheduler import Chunk


class TimedRequest(Protocol):
    """Request with the times of its arrival and of its first token, by `time.perf_counter`."""

    asked_s: float
    began_s: float


class Latencies:
    """Latency histograms of the requests that generate, in seconds.

    Attributes:
        by_name: time_to_first_token_s, from the request's arrival; time_per_token_s, the mean of the tokens after the
            first; request_s, from arrival to the last token.
    """

    def __init__(self) -> None:
        self.by_name = {name: Histogram() for name in ("time_to_first_token_s", "time_per_token_s", "request_s")}

    def began(self, request: TimedRequest) -> None:
        """Record that a request has its first token."""
        request.began_s = time.perf_counter()
        self.by_name["time_to_first_token_s"].observe(request.began_s - request.asked_s)

    def ended(self, request: TimedRequest, num_tokens: int) -> None:
        """Record that a request is complete, with `num_tokens` tokens."""
        now = time.perf_counter()
        self.by_name["request_s"].observe(now - request.asked_s)
        if num_tokens > 1:
            self.by_name["time_per_token_s"].observe((now - request.began_s) / (num_tokens - 1))


def count_step(metrics: dict[str, float], chunks: list[Chunk], sampled: list[list[int]]) -> None:
    """Add one call into the kernels to the engine's counts. This must be done before the call's tokens are added to
    their sequences, because a request without sampled tokens, or with more than one token to compute, counts as
    prefill.

    Args:
        metrics: counts by name, as `NativeEngine.metrics` lists them; changed in place.
        sampled: tokens of each chunk that samples.
    """
    reading = [chunk for chunk in chunks if chunk.count > 1 or not chunk.samples or not chunk.sequence.logprobs]
    metrics["steps"] += max(map(len, sampled), default=1)
    metrics["generated_tokens"] += sum(map(len, sampled))
    scored = sum(chunk.count for chunk in reading if chunk.sequence.scored_from is not None)
    metrics["scored_tokens"] += scored
    metrics["prefill_tokens"] += sum(chunk.count for chunk in reading) - scored
    metrics["cached_tokens"] += sum(c.sequence.cached_tokens for c in reading if c.samples and not c.sequence.logprobs)
    metrics["max_running"] = max(metrics["max_running"], len(chunks))
