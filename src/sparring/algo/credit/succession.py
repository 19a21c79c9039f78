"""Succession of a trajectory's turns: the next turn along branches and links, in logical rather than clock order.

design/0006-credit-along-links.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sparring.types import Segment, Trajectory

Values = Sequence[Sequence[float]]
"""Values per turn and step; a turn may have no steps."""
Address = tuple[int, ...]
"""Logical position of a turn or step, comparable between trajectories."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """Logical position of a step. `before`: number of the step before it in its chain or, where a side chain begins, in
    the chain that it hangs on; None if there is none."""

    address: Address
    before: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Succession:
    """Order of a trajectory's turns, which are numbered in the order of their requests.

    A turn is followed by the next turn of its branch. The last turn of a branch is followed by the first turn whose
    prompt quotes its reply, such as a sub-agent's answer in a tool result, or a summary. If nothing quotes it and the
    agent, by deleting or editing messages, replaced the branch by a new branch, the first turn of the new branch
    follows. If the turn only started another agent, that agent's first turn follows. Otherwise the trajectory ends. So
    every turn has one successor or is an end, and turns form chains.

    A chain that merges into another (a sub-agent's, an abandoned branch) is a side chain. It hangs on the other chain's
    last turn that was requested before the side chain began: the turn that started it, or a later one.

    Attributes:
        following: number of the next turn, for each turn; None at the end.
        beside: first turns of the side chains that hang on a turn, for each turn.
        chains: turns of each chain, by its first turn.
        main: the chain in which the first agent's last turn lies; empty if there are no turns.
    """

    following: tuple[int | None, ...]
    beside: tuple[tuple[int, ...], ...]
    chains: dict[int, list[int]]
    main: tuple[int, ...]

    def earned(self, rewards: Values, discount: float, rest: float = 0.0) -> list[list[float]]:
        """Add to each step's own reward the rewards of side chains, and at the ends `rest`, the part of the outcome
        that no turn has earned.

        The last step of a turn gets the discounted rewards of the side chains that hang on the turn. The last step of
        each chain that ends with the trajectory gets `rest`. The return along `following` then counts no reward twice.
        """
        values = [list(of_turn) for of_turn in rewards]
        chain_rewards: dict[int, float] = {}
        for first in sorted(self.chains, reverse=True):  # side chains begin after the chain they hang on
            pending = 0.0
            for turn in reversed(self.chains[first]):
                for other in self.beside[turn]:
                    pending += discount * chain_rewards[other]
                if values[turn]:
                    values[turn][-1] += pending
                    pending = 0.0
            total = 0.0
            for reward in (reward for turn in reversed(self.chains[first]) for reward in reversed(values[turn])):
                total = reward + discount * total
            chain_rewards[first] = total
        for turns in self.chains.values():
            turns_with_steps = [turn for turn in turns if values[turn]]
            if turns_with_steps and self.following[turns[-1]] is None:
                values[turns_with_steps[-1]][-1] += rest
        return values

    def behind(self, lengths: Sequence[int]) -> list[int | None]:
        """Map each step to its successor along `following`, None at the end; turn t has `lengths[t]` steps."""
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
        """Return the address of each turn.

        The address of a turn of the main chain is the turn's number in the chain. The address of a turn of a side chain
        has three parts: the address of the turn that the chain hangs on, the chain's number among those that hang on
        that turn, and the turn's number in the chain.
        """
        places = {
            turn: (*prefix, number)
            for first, prefix in self._prefixes().items()
            for number, turn in enumerate(self.chains[first])
        }
        return [places[turn] for turn in range(len(self.following))]

    def steps(self, lengths: Sequence[int]) -> list[StepPlace]:
        """Return the position of each step, given each turn's number of steps."""
        starts = list(accumulate(lengths, initial=0))
        hangs = self._attachments()
        places: dict[int, StepPlace] = {}
        for first, prefix in self._prefixes().items():
            before = self._last_step(hangs[first], starts) if first in hangs else None
            steps = (step for turn in self.chains[first] for step in range(starts[turn], starts[turn + 1]))
            for number, step in enumerate(steps):
                places[step] = StepPlace(address=(*prefix, number), before=before)
                before = step
        return [places[step] for step in range(starts[-1])]

    def _last_step(self, turn: int, starts: Sequence[int]) -> int | None:
        """Return the last step of a turn; for a turn without steps, the last step before it on its chain."""
        chain = next(turns for turns in self.chains.values() if turn in turns)
        earlier = chain[: chain.index(turn) + 1]
        return next((starts[at + 1] - 1 for at in reversed(earlier) if starts[at + 1] > starts[at]), None)

    def _attachments(self) -> dict[int, int]:
        """Return the turn that each side chain hangs on, by the chain's first turn."""
        return {first: turn for turn, firsts in enumerate(self.beside) for first in firsts}

    def _prefixes(self) -> dict[int, Address]:
        """Return the address of each chain by its first turn, in the order of first turns."""
        hangs = self._attachments()
        place = {turn: (first, number) for first, of in self.chains.items() for number, turn in enumerate(of)}
        prefixes: dict[int, Address] = {}
        num_detached = 0
        for first in sorted(self.chains):
            if first in self.main[:1]:
                prefixes[first] = ()
            elif first in hangs:
                chain, number = place[hangs[first]]
                prefixes[first] = (*prefixes[chain], number, self.beside[hangs[first]].index(first))
            else:
                prefixes[first] = (-1, num_detached)
                num_detached += 1
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
    """Return whether the trajectory has a single branch."""
    return all(segment.parent == (segment.index - 1 if segment.index else None) for segment in trajectory.segments)


class _Links:
    """Branches and links between the turns of a trajectory, by turn number."""

    def __init__(self, trajectory: Trajectory, turns: Sequence[Segment]) -> None:
        self._segments = trajectory.segments
        self._number = {turn.index: number for number, turn in enumerate(turns)}
        agents = _agents(trajectory)
        self._agent = [agents[turn.index] for turn in turns]
        self._requests = [tuple(self._request_segments(turn)) for turn in turns]
        self._parent = [self._turn_at(request[-1].parent) for request in self._requests]
        self._fork = [next((s.fork for s in request if s.fork is not None), None) for request in self._requests]
        self._latest = list(range(len(turns)))  # last turn in each turn's subtree
        for turn in reversed(range(len(turns))):
            parent = self._parent[turn]
            if parent is not None:
                self._latest[parent] = max(self._latest[parent], self._latest[turn])

    def succession(self) -> Succession:
        following = self._following()
        hangs = [self._attachment(turn, following) for turn in range(len(following))]
        before = self._predecessors(following, hangs)
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
        last = self._last_turn(following)
        return Succession(
            following=tuple(following),
            beside=_without_double_counts(following, chains, beside),
            chains=chains,
            main=() if last is None else tuple(chains[first_of[last]]),
        )

    def _request_segments(self, turn: Segment) -> Iterator[Segment]:
        """Yield a turn and the segments of its prompt, back to the turn that it continues or to the root."""
        yield turn
        at = turn.parent
        while at is not None and at not in self._number:
            yield self._segments[at]
            at = self._segments[at].parent

    def _turn_at(self, index: int | None) -> int | None:
        """Return the number of the nearest turn at or above a segment, or None."""
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
            if same or own:  # prefer the same agent; after a hand-over the other agent's turn follows
                following[turn] = max(same or own, key=lambda child: self._latest[child])
        for turn in range(count):
            fork, cause = self._fork[turn], self._cause(turn)
            starts_agent = fork is not None and fork.reason == "agent"
            for quoted in self._quoted_turns(turn):
                if quoted < turn and following[quoted] is None and not (starts_agent and quoted == cause):
                    following[quoted] = turn
            abandoned = self._abandoned_turn(turn)
            if abandoned is not None and following[abandoned] is None:
                following[abandoned] = turn
        for turn in range(count):  # turns that only started another agent
            cause = self._cause(turn)
            if cause is not None and following[cause] is None:
                following[cause] = turn
        return following

    def _quoted_turns(self, turn: int) -> list[int]:
        """Return the turns that a turn's prompt quotes, in order."""
        return sorted(
            {self._number[at] for segment in self._requests[turn] for at in segment.quotes if at in self._number}
        )

    def _abandoned_turn(self, turn: int) -> int | None:
        """Return the last turn of the branch that the agent abandoned for this turn; None if it abandoned none."""
        fork = self._fork[turn]
        if fork is None or fork.reason in ("agent", "auxiliary"):
            return None
        earlier = (number for number in reversed(range(turn)) if self._agent[number] == self._agent[turn])
        return next((number for number in earlier if fork.of is None or self._is_below(number, fork.of)), None)

    def _is_below(self, turn: int, index: int) -> bool:
        """Return whether a turn is the segment with this index or descends from it."""
        at: int | None = self._requests[turn][0].index
        while at is not None and at > index:
            at = self._segments[at].parent
        return at == index

    def _predecessors(self, following: Sequence[int | None], hangs: Sequence[int | None]) -> list[int | None]:
        """Return for each turn the previous turn of its chain; None if it begins a chain.

        The previous turn is one of those that have this turn as their `following`; `_rank` decides between several. A
        turn to which no path leads from its cause begins a chain even so.
        """
        candidates_of: list[list[int]] = [[] for _ in following]
        for turn, follows in enumerate(following):
            if follows is not None:
                candidates_of[follows].append(turn)
        predecessors: list[int | None] = []
        first_of: list[int] = []
        for turn, candidates in enumerate(candidates_of):
            cause = self._cause(turn)
            goes_on = bool(candidates) and (cause is None or turn in _path(cause, following))
            chosen = (
                max(candidates, key=lambda other: self._rank(other, turn, candidates, first_of, hangs))
                if goes_on
                else None
            )
            predecessors.append(chosen)
            first_of.append(turn if chosen is None else first_of[chosen])
        return predecessors

    def _rank(
        self, turn: int, follows: int, candidates: Sequence[int], first_of: Sequence[int], hangs: Sequence[int | None]
    ) -> tuple[int, bool, bool, int]:
        """Return the sort key of `turn` among the `candidates` that turn `follows` can continue; the largest key wins.

        Preferred is the turn on whose chain the largest number of other candidates hang; among equals the parent of
        `follows`, then a turn of the same agent, then the latest turn.
        """

        def hangs_on(first: int, other: int) -> bool:
            at = hangs[first]
            while at is not None and first_of[at] != other:
                at = hangs[first_of[at]]
            return at is not None

        own = first_of[turn]
        num_hanging = sum(first_of[other] != own and hangs_on(first_of[other], own) for other in candidates)
        return num_hanging, self._parent[follows] == turn, self._agent[follows] == self._agent[turn], turn

    def _last_turn(self, following: Sequence[int | None]) -> int | None:
        ends = [turn for turn, follows in enumerate(following) if follows is None]
        own = [turn for turn in ends if self._agent[turn] == self._agent[0]]
        return max(own or ends, default=None)

    def _cause(self, turn: int) -> int | None:
        """Return the turn that caused a turn: the one that it continues, else the origin that its fork names, else the
        latest earlier turn that its prompt quotes, else None."""
        fork, cause = self._fork[turn], self._parent[turn]
        if cause is None and fork is not None:
            cause = self._turn_at(fork.of)
        if cause is None:
            cause = next((quoted for quoted in reversed(self._quoted_turns(turn)) if quoted < turn), None)
        return cause

    def _attachment(self, first: int, following: Sequence[int | None]) -> int | None:
        """Return the turn that a chain with this first turn hangs on; None if there is no such turn.

        It is the last turn before `first` on the path from the chain's cause. Without a cause: on a branch that the
        chain merges into, else the first agent's last turn, unless its path joins the chain.
        """
        cause = self._cause(first)
        if cause is not None:
            return [turn for turn in _path(cause, following) if turn < first][-1]
        path = _path(first, following)
        for merged in path[1:]:
            candidate = self._parent[merged]
            if candidate is not None and candidate not in path:
                while candidate is not None and candidate >= first:
                    candidate = self._parent[candidate]
                if candidate is not None:
                    return candidate
        before = max((turn for turn in range(first) if self._agent[turn] == self._agent[0]), default=None)
        return None if before is None or set(path).intersection(_path(before, following)) else before


def _without_double_counts(
    following: Sequence[int | None], chains: dict[int, list[int]], beside: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Drop side chains that would make a return count a turn twice, and return those that remain for each turn.

    Links can cross, such as when a leader's message to a sub-agent came back to the leader later. A set of turns is an
    integer with one bit per turn.
    """
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


def _path(turn: int, following: Sequence[int | None]) -> list[int]:
    path = [turn]
    while (then := following[path[-1]]) is not None:
        path.append(then)
    return path


def _agents(trajectory: Trajectory) -> list[str]:
    """Return the agent of each segment: the id that its client sent. An agent without an id that began during another's
    conversation gets a new name; all other segments inherit the agent of the segment that they continue or fork
    from."""
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
