"""Rewards and states of single turns: each answer of the world is assigned to the turn that it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from sparring.errors import HarnessError
from sparring.record.identity import message_key
from sparring.record.tool_names import stands_for
from sparring.types import Message, Observation, Score, Segment, ToolCall, Trajectory

SHOWN = 60
"""Number of characters of a reply that an error message shows."""


class WorldAnswer(NamedTuple):
    """Answer of the world. The opening has an empty role and no reply."""

    role: str
    reply: Message | None
    observation: Observation


class AnsweredTurns:
    """Assignment of the world's answers to the turns of one role.

    A reply that the harness gave to the world is matched with the turn whose message is the same object. If there is no
    such turn, it is matched with an equal message, else with a message that differs only in form (`message_key`). A
    reply without calls is last matched with a message of the same text, because some programs pass on the text alone.
    Among turns that match equally well, the turn that continues from the previously answered turn is chosen, so that
    equal words of another agent are not confused with it. If no turn continues from it, the first is chosen, with
    agents' turns before summaries.

    A reply that consists only of calls is matched with the turn that made them: programs run the calls of a reply one
    by one, and prefix tool names with a server's name. If a role has one turn, all answers belong to it.

    Args:
        replies: replies that the world answered, in order.

    Attributes:
        numbers: number of the turn for each reply; None if it belongs to no turn.
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
            number = self._choose(equal, self.numbers[:at])
            if number is not None:
                self._left[number], self._calls[number] = None, []
            elif reply.tool_calls:
                number = self._find_caller(reply, self.numbers[:at])
            self.numbers[at] = number

    def _find_caller(self, reply: Message, before: Sequence[int | None]) -> int | None:
        """Return the turn that made all calls of a reply, and mark its calls as run; None if there is no such turn."""
        text = reply.content.strip()
        able = [
            number
            for number, turn in enumerate(self._turns)
            if _match_calls(reply.tool_calls, self._calls[number])
            and (not text or turn.message is not None and text == turn.message.content.strip())
        ]
        number = self._choose(able, before)
        if number is not None:
            for call in _match_calls(reply.tool_calls, self._calls[number]) or ():
                self._calls[number].remove(call)
            self._left[number] = None
        return number

    def _choose(self, numbers: Sequence[int], before: Sequence[int | None]) -> int | None:
        """Return the turn to choose among turns that match equally well; None if there are no turns. The previously
        answered turn itself is preferred, because its calls are answered one by one."""
        if len(numbers) < 2:
            return numbers[0] if numbers else None
        last = next((number for number in reversed(before) if number is not None), None)
        if last in numbers:
            return last
        goes_on = [] if last is None else [number for number in numbers if last in self._path(number)]
        return min(goes_on or numbers, key=lambda number: (self._turns[number].label != "agent", number))

    def _path(self, number: int) -> Iterator[int]:
        """Yield the numbers of the turns before a turn on its branch."""
        by_index = {turn.index: place for place, turn in enumerate(self._turns)}
        at = self._turns[number].parent
        while at is not None:
            if at in by_index:
                yield by_index[at]
            at = self._segments[at].parent


def with_turns(
    score: Score, trajectories: Sequence[Trajectory], answers: Sequence[WorldAnswer], *, several: bool
) -> Score:
    """Return a score with rewards and states of turns added, unless it has them already. A turn's reward is the sum
    over its answers, 0 without any; its state is the state in which it was sampled.

    Args:
        answers: answers of the world, beginning with the opening.

    Raises:
        HarnessError: an answer with a reward or a state belongs to no turn.
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
                    raise _no_turn_error(trajectory, answers[place], at.index(place) + 1)
                continue
            earned[number] += reward
            if stood[number] is None:
                stood[number] = answers[place - 1].observation.state_key
        unmatched = _next_agent_turn(trajectory.turns, numbers)
        if not several and unmatched is not None:
            stood[unmatched] = answers[-1].observation.state_key
        rewards[trajectory.role], states[trajectory.role] = tuple(earned), tuple(stood)
    if several:
        score = replace(score, per_role_turns=rewards) if rewarded else score
        return replace(score, per_role_states=states) if in_states else score
    role = sampled[0].role
    score = replace(score, per_turn=rewards[role]) if rewarded else score
    return replace(score, states=states[role]) if in_states else score


def _next_agent_turn(turns: Sequence[Segment], numbers: Sequence[int | None]) -> int | None:
    """Return the first agent's turn after the last answered one, or None if all are answered."""
    last = max((number for number in numbers if number is not None), default=-1)
    return next((n for n, turn in enumerate(turns) if n > last and turn.label == "agent"), None)


def _match_calls(wanted: Sequence[ToolCall], calls: Sequence[ToolCall]) -> list[ToolCall] | None:
    """Return the calls of a turn that match the calls of a reply, one for each, by id or else by name and arguments;
    None if a call has no match."""
    rest, taken = list(calls), []
    for call in wanted:
        named = [other for other in rest if stands_for(other.name or "", call.name or "")]
        named.sort(key=lambda other: other.name != call.name)  # an equal name before one that only ends with it
        equal = [o for o in named if o.id == call.id] or [o for o in named if _arguments(o) == _arguments(call)]
        equal = equal or [o for o in named if _has_more_arguments(o, call) or _has_more_arguments(call, o)]
        if not equal:
            return None
        rest.remove(equal[0])
        taken.append(equal[0])
    return taken


def _has_more_arguments(call: ToolCall, by: ToolCall) -> bool:
    """Return whether `by` has all arguments of `call`, and perhaps more, because clients may add default values."""
    if call.arguments is None or by.arguments is None:
        return False
    same = {name: value for name, value in by.arguments.items() if name in call.arguments}
    return _arguments(replace(by, arguments=same)) == _arguments(call)


def _arguments(call: ToolCall) -> bytes:
    """Return a key that is equal for equal arguments."""
    return message_key(Message(role="assistant", tool_calls=(replace(call, name=""),)))


def _no_turn_error(trajectory: Trajectory, answer: WorldAnswer, number: int) -> HarnessError:
    what = "a state" if not answer.observation.reward else f"the reward {answer.observation.reward:g}"
    turns = "; ".join(f"{at} {_excerpt(turn.message)}" for at, turn in enumerate(trajectory.turns))
    return HarnessError(
        f"rollout {trajectory.id}: expected env.step to be given replies of {trajectory.role}, as its turns say them "
        f"({turns[:1000]}), got {_excerpt(answer.reply)} in call {number}, which earned {what}; pass a reply on as the "
        "session returned it, or name it (env.step(..., of=reply)), or let the environment score its turns "
        "(Score.per_turn, states)"
    )


def _excerpt(message: Message | None) -> str:
    if message is None:
        return "nothing"
    text = message.content or ", ".join(
        f"{call.name}({call.raw or dict(call.arguments or {})})" for call in message.tool_calls
    )
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
