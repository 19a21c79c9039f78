"""Blame: whether a world breaks because of what the policy did in it, or alone (law 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from sparring.errors import PolicyFailure
from sparring.rollout.journal import Playback
from sparring.types import Failure, Message

WORLDS = 3
"""Rebuilt worlds in which the same call must break again before the failure is the policy's. Of calls of which 15 %
fail alone, 0.05 % fail in four worlds one after the other."""

Call = tuple[str, ...]
"""A kind of call: its phase, the role that replied, and the tools that were called."""


OPENING: Call = ("open", "")
"""An environment is opened."""


def unheard(call: Call) -> None:
    """Take no note of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of a call of the world in its rollout: its kind, and the number of the role's answers before it."""

    call: Call
    number: int


class Successes:
    """Successful calls of one environment, over all its rollouts, by kind."""

    def __init__(self) -> None:
        self.counts: defaultdict[Call, int] = defaultdict(int)


class WorldCalls:
    """Calls of the worlds of one rollout, over all its attempts, beside those of the environment's other rollouts.

    Args:
        successes: of the environment; shared by its rollouts.

    Attributes:
        answered: called with the kind of every call that was answered.
    """

    def __init__(self, successes: Successes) -> None:
        self.answered: Callable[[Call], None] = unheard
        self._environment = successes.counts
        self._own: defaultdict[Call, int] = defaultdict(int)
        self._broken: dict[Place, tuple[Failure, int, int]] = {}

    def succeeded(self, place: Place) -> None:
        """Count a call that was answered. Whatever broke in its place before broke alone."""
        self._environment[place.call] += 1
        self._own[place.call] += 1
        self.answered(place.call)
        if self._broken:
            self._broken.pop(place, None)

    def broke(self, place: Place, failure: Failure) -> bool:
        """Count a call that broke, in a world in which everything before it was the same.

        A world counts if the failure is the same as in the world before, and another rollout's call of this kind was
        answered since the last world that counts: where none was, it is the environment that is broken.

        Returns:
            Whether the failure is the policy's: the call broke in a first world and again in `WORLDS` that count.
        """
        others = self._environment.get(place.call, 0) - self._own.get(place.call, 0)
        before, worlds, others_before = self._broken.get(place, (failure, 0, others))
        if before != failure:
            worlds = 0
        elif others > others_before:
            worlds += 1
        else:
            others = others_before
        self._broken[place] = (failure, worlds, others)
        return worlds >= WORLDS

    def forget(self) -> None:
        """Begin again with worlds in which other replies may come first."""
        self._broken.clear()


class AttemptCalls:
    """Calls of the world in one attempt.

    Args:
        calls: calls of the rollout's worlds.
        playback: play of the journal, which knows the calls that were answered before.

    Attributes:
        broken: the call that raised last, unless the journal has an answer to it; None if no call raised.
    """

    def __init__(self, calls: WorldCalls, playback: Playback) -> None:
        self._calls, self._playback = calls, playback
        self.broken: Place | None = None

    def call(self, phase: str, role: str = "", reply: Message | None = None) -> AttemptCall:
        """Count one call of the world, which is the body of `with`.

        Args:
            phase: `open`, `step` or `score`.
            role: role that replied.
            reply: reply that the call is about.
        """
        tools = tuple(sorted({call.name for call in reply.tool_calls})) if reply and reply.tool_calls else ()
        return AttemptCall(self, Place(call=(phase, role, *tools), number=self._playback.answers[role]))

    def ended(self, place: Place, error: BaseException | None) -> None:
        """Count how a call ended. A failure of the policy is no failure of the world."""
        if error is None:
            self._calls.succeeded(place)
        elif isinstance(error, Exception) and not isinstance(error, PolicyFailure):
            phase, role, *_ = place.call
            answered = phase != "score" and self._playback.has_answer(role)
            self.broken = None if answered else place


class AttemptCall:
    """One call of the world, which is the body of `with`."""

    __slots__ = ("_calls", "_place")

    def __init__(self, calls: AttemptCalls, place: Place) -> None:
        self._calls, self._place = calls, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self._calls.ended(self._place, cause)
