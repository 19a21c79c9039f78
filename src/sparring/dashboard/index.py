"""Index of a run's recorded rollouts, updated while the run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparring.dashboard.page_data import GROUP_STAGES, credit_of
from sparring.dashboard.rollouts import entry, group_advantages, members, summary
from sparring.errors import refusal
from sparring.protocols import Store
from sparring.types import Group, Rollout, Score

SEARCHED = 200
"""Maximum number of searched characters of a first question or a last answer, and of a search with several words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLine:
    """Rollout in the list. `text` is the searched text in lower case; `number` is its group's admission index; `facts`
    are for the page."""

    stage: str
    number: int
    facts: Mapping[str, Any]
    text: str


class RolloutIndex:
    """List of a run's rollouts, by stage and admission. `update` reads only new groups."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, RolloutLine]] = {stage: {} for stage in GROUP_STAGES}
        self._last: dict[str, int] = {}

    def update(self, store: Store) -> None:
        """Read the groups recorded since the last call. A stage that a resumed run rolled back is read again."""
        for stage in GROUP_STAGES:
            last = self._last.get(stage, -1)
            if last >= 0 and next(iter(store.groups(stage=stage, first=last, end=last + 1)), None) is None:
                self._lines[stage].clear()
                last = -1
            for group in store.groups(stage=stage, first=last + 1):
                self._last[stage] = group.index
                for rollout, score in members(group):
                    self._lines[stage][rollout.id] = _line(stage, group, rollout, score)

    def outcomes(self) -> Counter[str]:
        """Return the number of rollouts of the rl stage by outcome."""
        return Counter(line.facts["outcome"] for line in self._lines["rl"].values())

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def lines(self) -> list[RolloutLine]:
        """Return all lines, the latest first."""
        return [line for lines in self._lines.values() for line in lines.values()][::-1]

    def axes(self) -> dict[str, list[str]]:
        """Return the values of each axis that has several values, to filter by."""
        lines = [line.facts for lines in self._lines.values() for line in lines.values()]
        values = {axis: sorted({value_of(line) for line in lines}) for axis, value_of in _AXES.items()}
        return {axis: names for axis, names in values.items() if len(names) > 1}

    def open(self, store: Store, config: Mapping[str, Any], id: str) -> dict[str, Any] | None:
        """Return a rollout with all its tokens for the viewer, or None if it is not recorded. Its advantages follow
        from the run's `config`."""
        line = next((lines[id] for lines in self._lines.values() if id in lines), None)
        if line is None:
            return None
        for group in store.groups(stage=line.stage, first=line.number, end=line.number + 1):
            for rollout, score in members(group):
                if rollout.id == id:
                    credit = credit_of(config) if line.stage == "rl" else None
                    advantages = group_advantages(group, credit) if credit else {}
                    return entry(group, rollout, score, line.stage, advantages)
        return None


def find(lines: Sequence[RolloutLine], chosen: Mapping[str, str], words: str = "") -> list[Mapping[str, Any]]:
    """Return the facts of the lines that match.

    Args:
        chosen: required values of `stage`, `dataset`, `outcome`, `success` or `reward`, as in `RolloutIndex.axes`.
        words: words that must occur in the rollout's id, task, outcome, reason, first question or last answer.

    Raises:
        BadInput: `words` has several words with more than `SEARCHED` characters together.
    """
    terms = set(words.lower().split())
    if len(terms) > 1 and len(words) > SEARCHED:
        raise refusal("words", f"at most {SEARCHED} characters of several words", str(len(words)), "search for fewer")
    return [
        line.facts
        for line in lines
        if all(_AXES[axis](line.facts) == value for axis, value in chosen.items() if value and axis in _AXES)
        and all(word in line.text for word in terms)
    ]


def _line(stage: str, group: Group, rollout: Rollout, score: Score | None) -> RolloutLine:
    facts = {**summary(rollout, score), "stage": stage, "version": group.version}
    messages = [segment.message for t in rollout.trajectories for segment in t.segments if segment.message is not None]
    question = next((message.content or "" for message in rollout.task.messages if message.role == "user"), "")
    answer = next((message.content or "" for message in reversed(messages) if message.role == "assistant"), "")
    names = (rollout.id, rollout.task.id, rollout.task.tag or "", rollout.outcome.kind, rollout.outcome.reason)
    text = "\n".join((*names, str(question)[:SEARCHED], str(answer)[:SEARCHED]))
    return RolloutLine(stage=stage, number=group.index, facts=facts, text=text.lower())


def _success(line: Mapping[str, Any]) -> str:
    return {None: "not judged", True: "solved", False: "not solved"}[line["success"]]


def _reward(line: Mapping[str, Any]) -> str:
    reward = line["reward"]
    return "not scored" if reward is None else "above 0" if reward > 0 else "below 0" if reward < 0 else "exactly 0"


_AXES = {
    "stage": lambda line: line["stage"],
    "dataset": lambda line: line["tag"] or "–",
    "outcome": lambda line: line["outcome"],
    "success": _success,
    "reward": _reward,
}
