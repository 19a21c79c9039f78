"""Journals of one role, made of the segments of a session."""

from collections.abc import Sequence

from sparring.rollout.journal import Journal, Playback
from sparring.types import Segment


def playback(segments: Sequence[Segment], role: str = "policy") -> Playback:
    """Return the play of a journal that has these segments."""
    journal = Journal("r")
    journal.sampled(role, segments)
    return Playback(journal)
