"""How long requests took, as their callers felt it. Torch-free; the engine's thread observes, anybody reads."""

from __future__ import annotations

import time

from sparring.engine.prometheus import Histogram
from sparring.engine.reply import Reply


class Latencies:
    """Histograms over the requests that generate, in seconds.

    Attributes:
        by_name: time_to_first_token_s, from the request's arrival; time_per_token_s, the mean over those after the
            first; request_s, from arrival to the last token.
    """

    def __init__(self) -> None:
        self.by_name = {name: Histogram() for name in ("time_to_first_token_s", "time_per_token_s", "request_s")}

    def began(self, reply: Reply) -> None:
        """Its first token is there."""
        reply.began_s = time.perf_counter()
        self.by_name["time_to_first_token_s"].observe(reply.began_s - reply.asked_s)

    def ended(self, reply: Reply, num_tokens: int) -> None:
        """Its last one is, of `num_tokens`."""
        now = time.perf_counter()
        self.by_name["request_s"].observe(now - reply.asked_s)
        if num_tokens > 1:
            self.by_name["time_per_token_s"].observe((now - reply.began_s) / (num_tokens - 1))
