"""Self-distillation on feedback: the teacher scores the student's tokens after a prompt that contains a solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sparring.algo.annotate.provenance import SampleProvenance
from sparring.algo.annotate.teacher import TeacherInput
from sparring.errors import refusal
from sparring.protocols import Renderer
from sparring.types import Group, Message, Rollout, Sample

FEEDBACK = "\n\nA correct solution of this:\n\n{solution}\n\nNow solve the task yourself."
"""Text added to the last message of the task."""


def sibling_feedback(provenance: SampleProvenance, renderer: Renderer) -> Callable[[Sample], TeacherInput | None]:
    """Return a function that builds, from a row, the input of a teacher that is shown a solution.

    The solution is the first other rollout of the row's group that succeeded (SDPO, arXiv 2601.20802, section 3, with
    the group's own successes as feedback). It is added to the task's last message; the row's sampled tokens follow
    unchanged.

    The function returns None for a row whose group has no other success. It raises BadInput if a row does not begin
    with its task's messages.
    """

    def reading(row: Sample) -> TeacherInput | None:
        number, _ = provenance.rollout(row)
        group = provenance.group(row)
        solution = _solution(group, besides=number)
        if solution is None:
            return None
        begin = provenance.branches(row)[-1][0]
        root, tools = begin.tokens, begin.tools or ()
        messages = group.task.messages
        if renderer.render(messages, tools).tokens != root:
            expected = "an environment whose first prompt is the task's messages, to which feedback can be added"
            raise refusal(f"task {group.task.id}", expected, "another prompt", 'set distill.feedback = "none"')
        last = messages[-1]
        informed = (*messages[:-1], replace(last, content=last.content + FEEDBACK.format(solution=solution)))
        prompt = renderer.render(informed, tools).tokens
        return TeacherInput(tokens=prompt + row.tokens[len(root) :], shift=len(prompt) - len(root))

    return reading


def _solution(group: Group, *, besides: int) -> str | None:
    """Return the replies of the first successful rollout other than number `besides`, joined to one text; None if no
    other rollout succeeded."""
    for number, (rollout, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
        if number != besides and score.success:
            return "\n".join(filter(None, map(_text, _replies(rollout))))
    return None


def _replies(rollout: Rollout) -> list[Message]:
    return [
        segment.message
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.is_turn and segment.message is not None
    ]


def _text(reply: Message) -> str:
    calls = [f"{call.name}({call.raw or dict(call.arguments or {})})" for call in reply.tool_calls]
    return "\n".join(filter(None, (reply.reasoning, reply.content, *calls)))
