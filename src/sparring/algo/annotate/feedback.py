"""Self-distillation on feedback: the teacher is told what the student was not, and reads what the student wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sparring.algo.annotate.teacher import Reading
from sparring.algo.annotate.watch import Watch
from sparring.errors import refusal
from sparring.protocols import Renderer
from sparring.types import Group, Message, Rollout, Sample, ToolSpec

TOLD = "\n\nA correct solution of this:\n\n{solution}\n\nNow solve the task yourself."
"""What is added to the last message of the task."""


def sibling_reading(watch: Watch, renderer: Renderer, tools: Sequence[ToolSpec]) -> Callable[[Sample], Reading | None]:
    """What a teacher reads that is shown a solution: the first rollout of the same group that succeeded, another than
    the row's (SDPO, arXiv 2601.20802, section 3, with the group's own successes as feedback). The row's tokens follow
    as they are.

    Returns:
        None for a row whose group has no other success.

    Raises:
        BadInput: by the returned function: the row does not begin with its task's messages.
    """

    def reading(row: Sample) -> Reading | None:
        place, _ = watch.rollout(row)
        group = watch.group(row)
        solution = _solution(group, besides=place)
        if solution is None:
            return None
        root = watch.branches(row)[-1][0].tokens
        messages = group.task.messages
        if renderer.render(messages, tools).tokens != root:
            expected = "a world that opens with the task's own messages, to which feedback can be added"
            raise refusal(f"task {group.task.id}", expected, "another prompt", 'set distill.feedback = "none"')
        told = (*messages[:-1], replace(messages[-1], content=messages[-1].content + TOLD.format(solution=solution)))
        prompt = renderer.render(told, tools).tokens
        return Reading(tokens=prompt + row.tokens[len(root) :], shift=len(prompt) - len(root))

    return reading


def _solution(group: Group, *, besides: int) -> str | None:
    """The replies of the first success among a row's siblings, as one text."""
    for place, (rollout, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
        if place != besides and score.success:
            return "\n".join(filter(None, map(_text, _replies(rollout))))
    return None


def _replies(rollout: Rollout) -> list[Message]:
    return [
        segment.message
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.model is not None and segment.message is not None
    ]


def _text(reply: Message) -> str:
    calls = [f"{call.name}({call.raw or dict(call.arguments or {})})" for call in reply.tool_calls]
    return "\n".join(filter(None, (reply.reasoning, reply.content, *calls)))
