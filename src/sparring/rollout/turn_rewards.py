"""Rewards and states of single turns: each answer of a world belongs to the reply that it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from sparring.errors import HarnessError
from sparring.record.identity import message_key
from sparring.record.tool_names import stands_for
from sparring.types import Message, Observation, Score, Segment, ToolCall, Trajectory

SHOWN = 60
"""Characters of a reply that an error repeats."""


class WorldAnswer(NamedTuple):
    """Answer of a world: the role that it answers, empty for the opening; the reply, None for the opening; and what was
    observed."""

    role: str
    reply: Message | None
    observation: Observation


class AnsweredTurns:
    """Turns of one role that its world answered.

    A reply that the world was given is the turn of the very same message, else of an equal one, else of one that
    differs in form alone (`message_key`), else, where it calls nothing, of one with its text: programs that know no
    calls pass on that alone. Of several that is the one that goes on from the turn that was answered
    before, so that another agent's equal words are not taken for it; else the first, agents' turns before summaries. A
    reply of calls alone is the turn that made them: programs run the calls of one reply one by one, and put a server's
    name before a tool's. Where a role has one turn, every answer is its.

    Args:
        trajectory: of the role.
        replies: that were answered, in order.

    Attributes:
        numbers: for each reply the number of its turn; None where it is none's.
    """

    def __init__(self, trajectory: Trajectory, replies: Sequence[Message]) -> None:
        self._segments = trajectory.segments
        self._turns = trajectory.turns
        self._left = [turn.message for turn in self._turns]
        self._calls: list[list[ToolCall]] = [[] if m is None else list(m.tool_calls) for m in self._left]
        keys = [None if turn.message is None else message_key(turn.message) for turn in self._turns]
        self.numbers: list[int | None] = [None] * len(replies)
        if len(self._turns) == 1:
            self.numbers = [0] * len(replies)
            return
        for at, reply in enumerate(replies):
            key = message_key(reply)
            same = [n for n, message in enumerate(self._left) if message is reply]
            equal = same or [n for n, message in enumerate(self._left) if message == reply]
            equal = equal or [n for n, message in enumerate(self._left) if message is not None and keys[n] == key]
            if not equal and not reply.tool_calls:
                text = reply.content.strip()
                equal = [n for n, m in enumerate(self._left) if m is not None and m.content.strip() == text]
            number = self._chosen(equal, self.numbers[:at])
            if number is not None:
                self._left[number], self._calls[number] = None, []
            elif reply.tool_calls:
                number = self._caller(reply, self.numbers[:at])
            self.numbers[at] = number

    def _caller(self, reply: Message, before: Sequence[int | None]) -> int | None:
        """Return the turn that made all calls of a reply, and take these from it; None where none did."""
        text = reply.content.strip()
        able = [
            number
            for number, turn in enumerate(self._turns)
            if _taken(reply.tool_calls, self._calls[number])
            and (not text or turn.message is not None and text == turn.message.content.strip())
        ]
        number = self._chosen(able, before)
        if number is not None:
            for call in _taken(reply.tool_calls, self._calls[number]) or ():
                self._calls[number].remove(call)
            self._left[number] = None
        return number

    def _chosen(self, numbers: Sequence[int], before: Sequence[int | None]) -> int | None:
        """Return which of equal turns a reply is, given those that were answered before it; None where there is none.
        The same one goes before all others: its calls are answered one by one."""
        if len(numbers) < 2:
            return numbers[0] if numbers else None
        last = next((number for number in reversed(before) if number is not None), None)
        if last in numbers:
            return last
        goes_on = [] if last is None else [number for number in numbers if last in self._path(number)]
        return min(goes_on or numbers, key=lambda number: (self._turns[number].label != "agent", number))

    def _path(self, number: int) -> Iterator[int]:
        """Yield the numbers of the turns that a turn goes on from."""
        by_index = {turn.index: place for place, turn in enumerate(self._turns)}
        at = self._turns[number].parent
        while at is not None:
            if at in by_index:
                yield by_index[at]
            at = self._segments[at].parent


def with_turns(
    score: Score, trajectories: Sequence[Trajectory], answers: Sequence[WorldAnswer], *, several: bool
) -> Score:
    """Return a score with what the world's answers said of each turn, where it does not say so itself: the rewards of
    the turn's answers together (0 where there were none), and the state that it was taken in.

    Args:
        score: the world's.
        trajectories: one for each role that was asked.
        answers: of the world, its opening first.
        several: whether the world has several roles.

    Raises:
        HarnessError: an answer has a reward, or a state, and is of no turn: what the world was given is no reply.
    """
    rewarded = any(answer.observation.reward is not None for answer in answers[1:])
    in_states = any(answer.observation.state_key is not None for answer in answers)
    rewarded = rewarded and (score.per_role_turns if several else score.per_turn) is None
    in_states = in_states and (score.per_role_states if several else score.states) is None
    sampled = [trajectory for trajectory in trajectories if trajectory.turns]
    if not sampled or not (rewarded or in_states):
        return score
    rewards: dict[str, tuple[float, ...]] = {}
    states: dict[str, tuple[str | None, ...]] = {}
    for trajectory in sampled:
        at = [place for place, answer in enumerate(answers) if place and answer.role == trajectory.role]
        replies = [reply for reply in (answers[place].reply for place in at) if reply is not None]
        numbers = AnsweredTurns(trajectory, replies).numbers
        earned, keys = [0.0] * len(trajectory.turns), [None] * len(trajectory.turns)
        stood: list[str | None] = [*keys]
        for place, number in zip(at, numbers, strict=True):
            reward = (answers[place].observation.reward or 0.0) if rewarded else 0.0
            if number is None:
                if reward or in_states:
                    raise _of_no_turn(trajectory, answers[place], at.index(place) + 1)
                continue
            earned[number] += reward
            if stood[number] is None:
                stood[number] = answers[place - 1].observation.state_key
        left = _unanswered(trajectory.turns, numbers)
        if not several and left is not None:
            stood[left] = answers[-1].observation.state_key
        rewards[trajectory.role], states[trajectory.role] = tuple(earned), tuple(stood)
    if several:
        score = replace(score, per_role_turns=rewards) if rewarded else score
        return replace(score, per_role_states=states) if in_states else score
    role = sampled[0].role
    score = replace(score, per_turn=rewards[role]) if rewarded else score
    return replace(score, states=states[role]) if in_states else score


def _unanswered(turns: Sequence[Segment], numbers: Sequence[int | None]) -> int | None:
    """Return the first agent's turn behind the last that was answered; None where there is none."""
    last = max((number for number in numbers if number is not None), default=-1)
    return next((n for n, turn in enumerate(turns) if n > last and turn.label == "agent"), None)


def _taken(wanted: Sequence[ToolCall], calls: Sequence[ToolCall]) -> list[ToolCall] | None:
    """Return those of some calls that others are, each once, by their ids, else by what is called; None where one is
    none of them."""
    left, taken = list(calls), []
    for call in wanted:
        named = [other for other in left if stands_for(other.name or "", call.name or "")]
        named.sort(key=lambda other: other.name != call.name)  # the very name goes before what ends with it
        equal = [o for o in named if o.id == call.id] or [o for o in named if _arguments(o) == _arguments(call)]
        equal = equal or [o for o in named if _completed(o, call) or _completed(call, o)]
        if not equal:
            return None
        left.remove(equal[0])
        taken.append(equal[0])
    return taken


def _completed(call: ToolCall, by: ToolCall) -> bool:
    """Return whether another call has all arguments of one, and more: clients write defaults, or leave them out."""
    if call.arguments is None or by.arguments is None:
        return False
    same = {name: value for name, value in by.arguments.items() if name in call.arguments}
    return _arguments(replace(by, arguments=same)) == _arguments(call)


def _arguments(call: ToolCall) -> bytes:
    """Return a key that is equal for equal arguments."""
    return message_key(Message(role="assistant", tool_calls=(replace(call, name=""),)))


def _of_no_turn(trajectory: Trajectory, answer: WorldAnswer, number: int) -> HarnessError:
    """Return the refusal of an answer that belongs to no turn."""
    what = "a state" if not answer.observation.reward else f"the reward {answer.observation.reward:g}"
    shown = "; ".join(f"{at} {_shown(turn.message)}" for at, turn in enumerate(trajectory.turns))
    return HarnessError(
        f"rollout {trajectory.id}: expected env.step to be given replies of {trajectory.role}, as its turns say them "
        f"({shown[:1000]}), got {_shown(answer.reply)} in call {number}, which earned {what}; pass a reply on as the "
        "session returned it, or name it (env.step(..., of=reply)), or let the environment score its turns "
        "(Score.per_turn, states)"
    )


def _shown(message: Message | None) -> str:
    """Return the beginning of what a message says or calls."""
    if message is None:
        return "nothing"
    text = message.content or ", ".join(
        f"{call.name}({call.raw or dict(call.arguments or {})})" for call in message.tool_calls
    )
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
