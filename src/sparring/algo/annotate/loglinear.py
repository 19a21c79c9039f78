"""Where the trainer stood before an update, guessed from versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparring.annotations import Annotation
from sparring.types import Sample


class ProximalShare:
    """Implements `Annotator`: how far along the way from the recorded to the current log-probability of a token those
    of the trainer before the update are taken to be, as the annotation `proximal_share`.

        share = (v - v_b) / (v + 1 - v_b)       log proximal = log behaviour + share * (log pi - log behaviour)

    with v the version before the update, which makes v + 1, and v_b the one that sampled the token: decoupled PPO's
    anchor without its forward (AReaL, Fu et al., arXiv 2505.24298, and its log-linear approximation). Tokens of version
    v keep what was recorded; the staler a token, the nearer its anchor is to now.

    Args:
        version: of the weights that the trainer holds when it is asked.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples with the annotation, 0.0 where nothing was sampled."""
        now = self._version()
        return [row.annotated(Annotation.PROXIMAL_SHARE, _shares(row, now)) for row in samples]


def _shares(row: Sample, now: int) -> tuple[float, ...]:
    versions = row.versions or (-1,) * len(row.tokens)
    return tuple([(now - version) / (now + 1 - version) if 0 <= version <= now else 0.0 for version in versions])
