"""Blame: decides whether the policy's actions broke the world, or the world broke on its own (law 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from sparring.errors import PolicyFailure
from sparring.rollout.journal import Playback
from sparring.types import Failure, Message

WORLDS = 3
"""Number of rebuilt worlds in which the same call must fail again before the failure is the policy's. If 15 % of the
calls fail at random, 0.05 % fail in four worlds in a row."""

Call = tuple[str, ...]
"""Kind of a call: its phase, the role that replied, and the called tools."""


OPENING: Call = ("open", "")
"""Call that opens an environment."""


def unheard(call: Call) -> None:
    """Ignore a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Position of a call in its rollout: its kind, and the number of answers that the role got before it."""

    call: Call
    number: int


class Successes:
    """Counts of successful calls of one environment, over all its rollouts, by kind."""

    def __init__(self) -> None:
        self.counts: defaultdict[Call, int] = defaultdict(int)


class WorldCalls:
    """Counts of one rollout's calls of its worlds, over all its attempts. Each failure is compared with the calls of
    the environment's other rollouts.

    Args:
        successes: counts of the environment, shared by all its rollouts.

    Attributes:
        answered: called with the kind of each successful call.
    """

    def __init__(self, successes: Successes) -> None:
        self.answered: Callable[[Call], None] = unheard
        self._environment = successes.counts
        self._own: defaultdict[Call, int] = defaultdict(int)
        self._broken: dict[Place, tuple[Failure, int, int]] = {}

    def succeeded(self, place: Place) -> None:
        """Count a successful call. An earlier failure at the same place was then no fault of the policy."""
        self._environment[place.call] += 1
        self._own[place.call] += 1
        self.answered(place.call)
        if self._broken:
            self._broken.pop(place, None)

    def broke(self, place: Place, failure: Failure, *, is_fork: bool = False) -> bool:
        """Count a failed call of a world whose earlier answers equal the recorded ones.

        A rebuilt world counts if the call fails in it as in the previous world, and if another rollout's call of this
        kind has succeeded since the last world that counted. Otherwise the environment itself may be broken. A world
        whose box is a fork of another world's does not count: both may break by what they share.

        Args:
            is_fork: whether the world's box is a fork of an earlier world's.

        Returns:
            Whether the failure is the policy's: the call failed in a first world, and again in `WORLDS` later worlds
            that count.
        """
        others = self._environment.get(place.call, 0) - self._own.get(place.call, 0)
        before, worlds, others_before = self._broken.get(place, (failure, 0, others))
        if before != failure:
            worlds = 0
        elif others > others_before and not is_fork:
            worlds += 1
        else:
            others = others_before
        self._broken[place] = (failure, worlds, others)
        return worlds >= WORLDS

    def forget(self) -> None:
        """Forget all failures, because the next attempt starts over and may sample other replies."""
        self._broken.clear()


class AttemptCalls:
    """Calls of the world in one attempt.

    Attributes:
        broken: place of the last failed call, unless the journal has an answer to it; None if no call failed.
    """

    def __init__(self, calls: WorldCalls, playback: Playback) -> None:
        self._calls, self.playback = calls, playback
        self.broken: Place | None = None

    def call(self, phase: str, role: str = "", reply: Message | None = None) -> AttemptCall:
        """Return a context manager that counts one call of the world, made in its body.

        Args:
            phase: `open`, `step` or `score`.
            reply: reply that the world is called with.
        """
        tools = tuple(sorted({call.name for call in reply.tool_calls})) if reply and reply.tool_calls else ()
        return AttemptCall(self, Place(call=(phase, role, *tools), number=self.playback.answers[role]))

    def ended(self, place: Place, error: BaseException | None) -> None:
        """Count the success or failure of a call. A failure of the policy does not count as a failure of the world."""
        if error is None:
            self._calls.succeeded(place)
        elif isinstance(error, Exception) and not isinstance(error, PolicyFailure):
            phase, role, *_ = place.call
            answered = phase != "score" and self.playback.has_answer(role)
            self.broken = None if answered else place


class AttemptCall:
    """Context manager that counts one call of the world."""

    __slots__ = ("_calls", "_place")

    def __init__(self, calls: AttemptCalls, place: Place) -> None:
        self._calls, self._place = calls, place

    def __enter__(self) -> None:
        self._calls.playback.begin_call()

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self._calls.playback.end_call()
        self._calls.ended(self._place, cause)
