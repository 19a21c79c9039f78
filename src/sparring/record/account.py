"""Account of what a session was asked: what it ended by, and what its client was told where it was answered nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sparring.errors import BadInput, LimitReached
from sparring.reply import NO_EVIDENCE
from sparring.types import UNTRAINED, Evidence, Segment


class RequestAccount:
    """Account of the requests of one session. The latest decides what the session ended by: a client that was cut short
    or told that its prompt is too long, and was answered afterwards, made the best of it.

    Attributes:
        limit: the limit that the latest request hit, of those that were answered or hit one; None where it hit none.
        refused: why the latest refused request was not answered; empty where none was refused.
    """

    def __init__(self) -> None:
        self.limit: LimitReached | None = None
        self.refused = ""
        self._made = self._latest = 0

    @contextmanager
    def request(self, evidence: Evidence) -> Iterator[Callable[[LimitReached | None], None]]:
        """Take note of how a request ends, which is made in the body of `with`: by what it raises, or by the limit that
        the yielded function is called with, None where it was answered whole. Nothing ends by a request for a title.

        Args:
            evidence: what the client says of it.
        """
        self._made += 1
        number = self._made

        def end(limit: LimitReached | None) -> None:
            if number > self._latest and evidence.label != "auxiliary":  # later ones may have been answered before
                self._latest, self.limit = number, limit

        try:
            yield end
        except LimitReached as limit:
            end(limit)
            raise
        except BadInput as error:
            self.refused = str(error)
            raise


class AccountedSession:
    """Session that keeps account of its requests.

    Attributes:
        account: of its requests.
    """

    def __init__(self) -> None:
        self.account = RequestAccount()

    @property
    def segments(self) -> Sequence[Segment]:
        """The record so far."""
        raise NotImplementedError

    @property
    def limit(self) -> LimitReached | None:
        """The limit that the latest request hit; see `AnsweringSession.limit`."""
        return self.account.limit

    @property
    def has_turn(self) -> bool:
        """True once it was answered with a turn of the rollout: its client got it, and it is no title."""
        return any(is_reply(segment) and segment.label not in UNTRAINED for segment in self.segments)

    @property
    def silence(self) -> str:
        """Fate of the requests, in words, where none was answered with a turn."""
        labels = [segment.label for segment in self.segments if is_reply(segment)]
        if labels:
            return f"got no reply to train, of {len(labels)} that are {' or '.join(sorted(set(labels)))}"
        reason = self.account.refused
        return f"was refused every request, the last for: {reason}" if reason else "requested no reply"

    def overflow(self, limit: LimitReached) -> None:
        """Take note of a request that nobody read; see `AnsweringSession.overflow`."""
        with self.account.request(NO_EVIDENCE) as end:
            end(limit)

    def refuse(self, reason: str) -> None:
        """Take note of a request that was refused before it came here."""
        self.account.refused = reason


def is_reply(segment: Segment) -> bool:
    """Return whether a segment is what a model, an expert or a teacher said in a session."""
    return segment.model is not None or segment.source in ("expert", "teacher")
