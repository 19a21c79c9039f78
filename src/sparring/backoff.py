"""Pauses before retries: exponential with full jitter, and equal in a replay."""

from __future__ import annotations

import xxhash

LONGEST_PAUSE_S = 60.0


def retry_pause_s(first_s: float, retry: int, *key: object) -> float:
    """Return the pause before a retry, in seconds: uniform between 0 and `first_s` * 2^(retry - 1), at most
    `LONGEST_PAUSE_S`, so that callers who failed together do not retry together (full jitter, Brooker 2015).

    Args:
        first_s: upper bound of the pause before the first retry.
        retry: number of the retry, from 1.
        key: identity of the work, such as the seed of a rollout; the pause is a function of it and of `retry`, never of
            a clock.
    """
    text = "\x1f".join(map(str, ("pause", *key, retry)))
    drawn: int = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
    return float(min(first_s * 2 ** (retry - 1), LONGEST_PAUSE_S) * drawn / 2**64)
