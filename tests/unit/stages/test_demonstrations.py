"""Which of the expert's conversations are imitated."""

from __future__ import annotations

from refusals import refused_at

from sparring.stages.data.demonstrations import Conversation, solved_conversations
from sparring.types import Score, StopReason, Task

TASK = Task(id="a", env="e", messages=(), data={})


def conversation(number: int, *, success: bool, cut_by: StopReason | None = None) -> Conversation:
    score = Score(reward=float(success), success=success)
    return Conversation(name=f"{number}", messages=(), tools=(), task=TASK, score=score, cut_by=cut_by)


def test_failed_demonstrations_are_left_out() -> None:
    shown = [conversation(n, success=n > 0) for n in range(10)]
    assert solved_conversations(shown) == shown[1:]


def test_an_expert_that_a_limit_cuts_is_refused_by_that_limit() -> None:
    right = [conversation(n, success=True) for n in range(7)]
    with refused_at("[env]", "7 of 9, 2 cut short by max_turns; raise that limit"):
        solved_conversations([*right, *(conversation(n, success=False, cut_by="max_turns") for n in (7, 8))])
    with refused_at("[env]", "7 of 9; correct the expert"):
        solved_conversations([*right, conversation(7, success=False), conversation(8, success=False)])
