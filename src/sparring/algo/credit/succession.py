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
        self._requests = [tuple(self._back_to_turn(turn)) for turn in turns]
        self._parent = [self._turn_at(request[-1].parent) for request in self._requests]
        self._fork = [next((s.fork for s in request if s.fork is not None), None) for request in self._requests]
        self._latest = list(range(len(turns)))  # of each turn's subtree
        for turn in reversed(range(len(turns))):
            parent = self._parent[turn]
            if parent is not None:
                self._latest[parent] = max(self._latest[parent], self._latest[turn])

    def succession(self) -> Succession:
        following = self._following()
        hangs = [self._hangs_on(turn, following) for turn in range(len(following))]
        before = self._before(following, hangs)
        chains: dict[int, list[int]] = {}
        first_of: list[int] = []
        for turn, on in enumerate(before):
            first_of.append(turn if on is None else first_of[on])
            chains.setdefault(first_of[turn], []).append(turn)
        beside: list[list[int]] = [[] for _ in following]
        for first in chains:
            on = hangs[first]
            if on is not None:
                beside[on].append(first)
        last = self._last(following)
        return Succession(
            following=tuple(following),
            beside=_counted_once(following, chains, beside),
            chains=chains,
            main=() if last is None else tuple(chains[first_of[last]]),
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
        count = len(self._requests)
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
            fork, cause = self._fork[turn], self._cause(turn)
            began = fork is not None and fork.reason == "agent"
            for quoted in self._quoted(turn):
                if quoted < turn and following[quoted] is None and not (began and quoted == cause):
                    following[quoted] = turn
            left = self._left(turn)
            if left is not None and following[left] is None:
                following[left] = turn
        for turn in range(count):  # what began an agent and did nothing else
            cause = self._cause(turn)
            if cause is not None and following[cause] is None:
                following[cause] = turn
        return following

    def _quoted(self, turn: int) -> list[int]:
        """Return the turns that are quoted in what was told before a turn, in order."""
        return sorted(
            {self._number[at] for segment in self._requests[turn] for at in segment.quotes if at in self._number}
        )

    def _left(self, turn: int) -> int | None:
        """Return the last turn of the branch that the agent of a turn left with it; None where it did not leave one."""
        fork = self._fork[turn]
        if fork is None or fork.reason in ("agent", "auxiliary"):
            return None
        earlier = (number for number in reversed(range(turn)) if self._agent[number] == self._agent[turn])
        return next((number for number in earlier if fork.of is None or self._is_below(number, fork.of)), None)

    def _is_below(self, turn: int, index: int) -> bool:
        """Return True if a turn is the segment with an index, or goes on from it."""
        at: int | None = self._requests[turn][0].index
        while at is not None and at > index:
            at = self._segments[at].parent
        return at == index

    def _before(self, following: Sequence[int | None], hangs: Sequence[int | None]) -> list[int | None]:
        """Return for each turn the one whose chain it goes on; None where it begins a chain.

        It goes on one that it follows, if it follows what caused it too. Of several that is the one on whose chain the
        others hang, else the one of its own branch, of its agent, the last.
        """
        leading: list[list[int]] = [[] for _ in following]
        for turn, follows in enumerate(following):
            if follows is not None:
                leading[follows].append(turn)
        before: list[int | None] = []
        first_of: list[int] = []
        for turn, leads in enumerate(leading):
            cause = self._cause(turn)
            goes_on = bool(leads) and (cause is None or turn in _way(cause, following))
            chosen = max(leads, key=lambda other: self._rank(other, turn, leads, first_of, hangs)) if goes_on else None
            before.append(chosen)
            first_of.append(turn if chosen is None else first_of[chosen])
        return before

    def _rank(
        self, turn: int, follows: int, leads: Sequence[int], first_of: Sequence[int], hangs: Sequence[int | None]
    ) -> tuple[int, bool, bool, int]:
        """Return what decides between the turns that one follows; the largest goes on."""

        def hangs_on(first: int, other: int) -> bool:
            at = hangs[first]
            while at is not None and first_of[at] != other:
                at = hangs[first_of[at]]
            return at is not None

        own = first_of[turn]
        carried = sum(first_of[other] != own and hangs_on(first_of[other], own) for other in leads)
        return carried, self._parent[follows] == turn, self._agent[follows] == self._agent[turn], turn

    def _last(self, following: Sequence[int | None]) -> int | None:
        """Return the turn that ends the main chain: the first agent's last."""
        ends = [turn for turn, follows in enumerate(following) if follows is None]
        own = [turn for turn in ends if self._agent[turn] == self._agent[0]]
        return max(own or ends, default=None)

    def _cause(self, turn: int) -> int | None:
        """Return the turn that a turn goes on from, else the one that its branch left or that began it, as its fork or
        a quote says; None where nothing does."""
        fork, cause = self._fork[turn], self._parent[turn]
        if cause is None and fork is not None:
            cause = self._turn_at(fork.of)
        if cause is None:
            cause = next((quoted for quoted in reversed(self._quoted(turn)) if quoted < turn), None)
        return cause

    def _hangs_on(self, first: int, following: Sequence[int | None]) -> int | None:
        """Return the turn that a chain with this first turn hangs on; None where nothing was asked for before it.

        It is the last turn asked for before it: of those that follow its cause; where that is not known, on the branch
        that it meets, else of the first agent.
        """
        cause = self._cause(first)
        if cause is not None:
            return [turn for turn in _way(cause, following) if turn < first][-1]
        way = _way(first, following)
        for met in way[1:]:
            on = self._parent[met]
            if on is not None and on not in way:
                while on is not None and on >= first:
                    on = self._parent[on]
                if on is not None:
                    return on
        before = max((turn for turn in range(first) if self._agent[turn] == self._agent[0]), default=None)
        return None if before is None or set(way).intersection(_way(before, following)) else before


def _counted_once(
    following: Sequence[int | None], chains: dict[int, list[int]], beside: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return which chains hang on each turn, without those of which a return would count a turn twice: where links
    cross, such as a leader's word to a sub-agent that went back behind it. Sets of turns are bits of a number."""
    retained: list[tuple[int, ...]] = [()] * len(following)
    counted = [0] * len(following)
    bodies: dict[int, int] = {}
    for turn in reversed(range(len(following))):
        follows = following[turn]
        seen = 1 << turn | (0 if follows is None else counted[follows])
        for first in beside[turn]:
            if not seen & bodies[first]:
                seen |= bodies[first]
                retained[turn] += (first,)
        counted[turn] = seen
        if turn in chains:
            bodies[turn] = 0
            for at in chains[turn]:
                bodies[turn] |= 1 << at
                for other in retained[at]:
                    bodies[turn] |= bodies[other]
    return tuple(retained)


def _way(turn: int, following: Sequence[int | None]) -> list[int]:
    """Return a turn and all that follow it."""
    way = [turn]
    while (then := following[way[-1]]) is not None:
        way.append(then)
    return way


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
