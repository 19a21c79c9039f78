"""Counters, gauges and histograms in the text format of Prometheus (exposition format 0.0.4). Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

BOUNDS_S = tuple(base * 10.0**exponent for exponent in range(-4, 3) for base in (1.0, 2.5, 5.0))
"""Upper bounds of the buckets of a latency: 0.1 ms to 500 s."""


class Histogram:
    """Counts of values per bucket, with bounds `BOUNDS_S`. One thread calls `observe`; other threads may read, and miss
    at most the newest value."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(BOUNDS_S, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        """Write the histogram's series; each bucket includes the counts of the smaller buckets."""
        below = 0
        for bound, count in zip((*BOUNDS_S, float("inf")), list(self.counts), strict=True):
            below += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {below}'
        yield f"{name}_sum {self.total!r}"
        yield f"{name}_count {below}"


def exposition(
    metrics: Mapping[str, float],
    latencies: Mapping[str, Histogram],
    requests: Mapping[tuple[str, str], int],
    version: int,
) -> str:
    """Return the page that Prometheus scrapes.

    Args:
        metrics: metrics of the engine by name: counts, except levels, which end in `_now` or begin with `max_`.
        requests: number of requests by endpoint and outcome.
    """
    lines = ["# TYPE sparring_weights_version gauge", f"sparring_weights_version {version}"]
    for name, value in metrics.items():
        level = name.endswith("_now") or name.startswith("max_")
        kind, series = ("gauge", f"sparring_{_unit(name)}") if level else ("counter", f"sparring_{_unit(name)}_total")
        lines += [f"# TYPE {series} {kind}", f"{series} {value!r}"]
    for name, histogram in latencies.items():
        lines += [f"# TYPE sparring_{_unit(name)} histogram", *histogram.lines(f"sparring_{_unit(name)}")]
    lines.append("# TYPE sparring_requests_total counter")
    for (endpoint, outcome), count in requests.items():
        lines.append(f'sparring_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}} {count}')
    return "\n".join([*lines, ""])


def _unit(name: str) -> str:
    """Spell a final `_s` as `_seconds`; drop `_now`."""
    name = name.removesuffix("_now")
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
