"""Succession of the turns of a trajectory: what follows a turn on its branch and along links, whatever the clock says.

design/0006-credit-along-links.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sparring.types import Segment, Trajectory

Values = Sequence[Sequence[float]]
"""A value for each step of each turn; a turn may have no step."""
Address = tuple[int, ...]
"""Place of a turn that the same turn of another trajectory has too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """Place of a step: its address, and the step before it, which the turn before or the one that its chain hangs on
    has; None for a first one."""

    address: Address
    before: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Succession:
    """Order of a trajectory's turns, which are numbered in the order of their requests.

    A turn is followed by the next one of its own branch. At the end of a branch follows the first turn behind a quote
    of its last reply (a sub-agent's answer in a tool's, a summary), else the first turn of the branch with which the
    same agent went on when it left this one (it deleted or edited messages), else the end of the trajectory. So every
    turn is followed by one turn or by the end, and turns form chains.

    A chain that meets another (a sub-agent's, a branch that was left) is beside it: it hangs on the last turn of the
    other that was asked for before it began, which is the turn that began it or a later one.

    Attributes:
        following: for each turn the number of the turn that follows; None is the end.
        beside: for each turn the first turns of the chains that hang on it.
        chains: the turns of each chain, by their first.
        main: the chain that the trajectory's first agent ended; empty where there is no turn.
    """

    following: tuple[int | None, ...]
    beside: tuple[tuple[int, ...], ...]
    chains: dict[int, list[int]]
    main: tuple[int, ...]

    def earned(self, rewards: Values, discount: float, rest: float = 0.0) -> list[list[float]]:
        """Return what was earned at each step: its own reward, at the last step of a turn also what chains beside it
        earn until they meet another, and at the end of each chain that ends with the trajectory `rest`.

        The return of a step is then the sum of what was earned from it on, along `following`, and counts no reward
        twice.

        Args:
            rewards: of each step of each turn.
            discount: per step.
            rest: what the outcome leaves.
        """
        values = [list(of_turn) for of_turn in rewards]
        worth: dict[int, float] = {}
        for first in sorted(self.chains, reverse=True):  # what hangs on a chain began after it
            pending = 0.0
            for turn in reversed(self.chains[first]):
                for other in self.beside[turn]:
                    pending += discount * worth[other]
                if values[turn]:
                    values[turn][-1] += pending
                    pending = 0.0
            total = 0.0
            for reward in (reward for turn in reversed(self.chains[first]) for reward in reversed(values[turn])):
                total = reward + discount * total
            worth[first] = total
        for turns in self.chains.values():
            spoken = [turn for turn in turns if values[turn]]
            if spoken and self.following[turns[-1]] is None:
                values[spoken[-1]][-1] += rest
        return values

    def behind(self, lengths: Sequence[int]) -> list[int | None]:
        """Return for each step the number of the step that follows it, over all turns with these numbers of steps."""
        starts = list(accumulate(lengths, initial=0))
        entry: list[int | None] = [None] * len(lengths)
        steps: list[int | None] = [None] * sum(lengths)
        for turn in reversed(range(len(lengths))):
            follows = self.following[turn]
            after = None if follows is None else entry[follows]
            start, length = starts[turn], lengths[turn]
            for step in range(start, start + length):
                steps[step] = step + 1 if step + 1 < start + length else after
            entry[turn] = start if length else after
        return steps

    def addresses(self) -> list[Address]:
        """Return for each turn its place: in the main chain its number there; in a chain beside another the place of
        the turn that it hangs on, which of those that hang there it is in, and its number."""
        places = {
            turn: (*prefix, number)
            for first, prefix in self._prefixes().items()
            for number, turn in enumerate(self.chains[first])
        }
        return [places[turn] for turn in range(len(self.following))]

    def steps(self, lengths: Sequence[int]) -> list[StepPlace]:
        """Return the place of each step, over all turns with these numbers of steps."""
        starts = list(accumulate(lengths, initial=0))
        hangs = self._hangs()
        places: dict[int, StepPlace] = {}
        for first, prefix in self._prefixes().items():
            before = self._last_step(hangs[first], starts) if first in hangs else None
            steps = (step for turn in self.chains[first] for step in range(starts[turn], starts[turn + 1]))
            for number, step in enumerate(steps):
                places[step] = StepPlace(address=(*prefix, number), before=before)
                before = step
        return [places[step] for step in range(starts[-1])]

    def _last_step(self, turn: int, starts: Sequence[int]) -> int | None:
        """Return the last step of a turn; of one without steps the step before it on its chain."""
        chain = next(turns for turns in self.chains.values() if turn in turns)
        earlier = chain[: chain.index(turn) + 1]
        return next((starts[at + 1] - 1 for at in reversed(earlier) if starts[at + 1] > starts[at]), None)

    def _hangs(self) -> dict[int, int]:
        """Return for the first turn of each chain beside another the turn that it hangs on."""
        return {first: turn for turn, firsts in enumerate(self.beside) for first in firsts}

    def _prefixes(self) -> dict[int, Address]:
        """Return the address of each chain by its first turn, in the order of these."""
        hangs = self._hangs()
        place = {turn: (first, number) for first, of in self.chains.items() for number, turn in enumerate(of)}
        prefixes: dict[int, Address] = {}
        alone = 0
        for first in sorted(self.chains):
            if first in self.main[:1]:
                prefixes[first] = ()
            elif first in hangs:
                chain, number = place[hangs[first]]
                prefixes[first] = (*prefixes[chain], number, self.beside[hangs[first]].index(first))
            else:
                prefixes[first] = (-1, alone)
                alone += 1
        return prefixes


def succession(trajectory: Trajectory) -> Succession:
    """Return the order of a trajectory's turns."""
    turns = trajectory.turns
    if _is_chat(trajectory, turns):
        count = len(turns)
        chain = list(range(count))
        following = (*range(1, count), None)[:count] if count else ()
        chains = {0: chain} if count else {}
        return Succession(following=following, beside=((),) * count, chains=chains, main=tuple(chain))
    return _Links(trajectory, turns).succession()


def _is_chat(trajectory: Trajectory, turns: Sequence[Segment]) -> bool:
    """Return True for a trajectory of one branch."""
    return all(segment.parent == (segment.index - 1 if segment.index else None) for segment in trajectory.segments)


class _Links:
    """Branches and links of a trajectory's turns, by number."""

    def __init__(self, trajectory: Trajectory, turns: Sequence[Segment]) -> None:
        self._segments = trajectory.segments
        self._number = {turn.index: number for number, turn in enumerate(turns)}
        agents = _agents(trajectory)
        self._agent = [agents[turn.index] for turn in turns]
        self._told = [tuple(self._back_to_turn(turn)) for turn in turns]
        self._parent = [self._turn_at(told[-1].parent) for told in self._told]
        self._fork = [next((s.fork for s in told if s.fork is not None), None) for told in self._told]
        self._latest = list(range(len(turns)))  # of each turn's subtree
        for turn in reversed(range(len(turns))):
            parent = self._parent[turn]
            if parent is not None:
                self._latest[parent] = max(self._latest[parent], self._latest[turn])

    def succession(self) -> Succession:
        following = self._following()
        before = self._before(following)
        chains: dict[int, list[int]] = {}
        ends: dict[int, int] = {}
        for turn in range(len(following)):
            on = before[turn]
            first = turn if on is None else ends[on]
            ends[turn] = first
            chains.setdefault(first, []).append(turn)
        last = self._last(following)
        beside: list[list[int]] = [[] for _ in following]
        for first, turns in chains.items():
            on = self._hangs_on(first, following[turns[-1]], following, before, last)
            if on is not None:
                beside[on].append(first)
        return Succession(
            following=tuple(following),
            beside=tuple(map(tuple, beside)),
            chains=chains,
            main=() if last is None else tuple(chains[ends[last]]),
        )

    def _back_to_turn(self, turn: Segment) -> Iterator[Segment]:
        """Yield a turn and what was told before it, back to the turn that it goes on from or to its root."""
        yield turn
        at = turn.parent
        while at is not None and at not in self._number:
            yield self._segments[at]
            at = self._segments[at].parent

    def _turn_at(self, index: int | None) -> int | None:
        """Return the number of the turn at a segment or above it; None where there is none."""
        while index is not None and index not in self._number:
            index = self._segments[index].parent
        return None if index is None else self._number[index]

    def _following(self) -> list[int | None]:
        count = len(self._told)
        following: list[int | None] = [None] * count
        children: list[list[int]] = [[] for _ in range(count)]
        for turn, parent in enumerate(self._parent):
            if parent is not None:
                children[parent].append(turn)
        for turn, own in enumerate(children):
            same = [child for child in own if self._agent[child] == self._agent[turn]]
            if same or own:  # an agent that hands its conversation over is followed by the other
                following[turn] = max(same or own, key=lambda child: self._latest[child])
        for turn in range(count):
            for quoted in self._quoted(turn):
                if quoted < turn and following[quoted] is None:
                    following[quoted] = turn
            left = self._left(turn)
            if left is not None and following[left] is None:
                following[left] = turn
        return following

    def _quoted(self, turn: int) -> list[int]:
        """Return the turns that are quoted in what was told before a turn, in order."""
        return sorted({self._number[at] for told in self._told[turn] for at in told.quotes if at in self._number})

    def _left(self, turn: int) -> int | None:
        """Return the last turn of the branch that the agent of a turn left with it; None where it did not leave one."""
        fork = self._fork[turn]
        if fork is None or fork.reason in ("agent", "auxiliary"):
            return None
        earlier = (number for number in reversed(range(turn)) if self._agent[number] == self._agent[turn])
        return next((number for number in earlier if fork.of is None or self._is_below(number, fork.of)), None)

    def _is_below(self, turn: int, index: int) -> bool:
        """Return True if a turn is the segment with an index, or goes on from it."""
        at: int | None = self._told[turn][0].index
        while at is not None and at > index:
            at = self._segments[at].parent
        return at == index

    def _before(self, following: Sequence[int | None]) -> list[int | None]:
        """Return for each turn the one of those that it follows whose chain it goes on: of its own branch, else of its
        agent, else the last."""
        chosen: list[int | None] = [None] * len(following)
        for turn, follows in enumerate(following):
            if follows is None:
                continue
            other = chosen[follows]
            if other is None or self._nearness(turn, follows) >= self._nearness(other, follows):
                chosen[follows] = turn
        return chosen

    def _nearness(self, turn: int, follows: int) -> tuple[bool, bool]:
        return self._parent[follows] == turn, self._agent[follows] == self._agent[turn]

    def _last(self, following: Sequence[int | None]) -> int | None:
        """Return the turn that ends the main chain: the first agent's last."""
        ends = [turn for turn, follows in enumerate(following) if follows is None]
        own = [turn for turn in ends if self._agent[turn] == self._agent[0]]
        return max(own or ends, default=None)

    def _hangs_on(
        self,
        first: int,
        meets: int | None,
        following: Sequence[int | None],
        before: Sequence[int | None],
        last: int | None,
    ) -> int | None:
        """Return the turn that the chain with this first turn hangs on; None for the first chain of all.

        It is searched from the turn that the chain left or that began it, along what follows, else in the chain that it
        `meets`, backwards.
        """
        fork = self._fork[first]
        on = self._parent[first] if fork is None or fork.of is None else self._turn_at(fork.of)
        if on is None:
            on = next((turn for turn in reversed(self._quoted(first)) if turn < first), None)
        if on is not None:
            follows = following[on]
            while follows is not None and follows < first:
                on, follows = follows, following[follows]
            return on
        on = last if meets is None else before[meets]
        while on is not None and on > first:
            on = before[on]
        return None if on == first else on


def _agents(trajectory: Trajectory) -> list[str]:
    """Return for each segment whose conversation it belongs to: the agent's id where its client says one, else a name
    of its own for each agent that began beside another."""
    agents: list[str] = []
    for segment in trajectory.segments:
        fork, parent, evidence = segment.fork, segment.parent, segment.evidence
        if fork is None:
            inherited = "" if parent is None else agents[parent]
            agents.append(evidence.agent if evidence is not None and evidence.agent else inherited)
        elif fork.reason in ("agent", "auxiliary"):
            agents.append(fork.agent or f"#{segment.index}")
        else:
            agents.append(fork.agent or ("" if fork.of is None else agents[fork.of]))
    return agents
