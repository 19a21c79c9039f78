"""Segments as a policy samples them."""

from collections.abc import Sequence
from typing import Any

from sparring.generation import Runs
from sparring.types import Segment


def sampled(index: int, parent: int | None, tokens: Sequence[int], *, version: int = 0, **more: Any) -> Segment:
    """Return a segment that was sampled by one version, of log-probabilities -0.5 where `more` has no others."""
    count = len(tokens)
    own = {"source": "policy", "model": "policy", "logprobs": (-0.5,) * count, "versions": Runs.of(version, count)}
    return Segment(**{"index": index, "parent": parent, "tokens": tuple(tokens), **own, **more})
