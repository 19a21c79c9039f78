"""Metrics of replies that came to nothing: calls that nobody can read, ends that the context cut, nothing to train."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conversations import TOOL
from segments import sampled

from sparring.observe.metrics import Metrics
from sparring.rollout.metrics import WARNED_ABOVE, Warnings, measure, shortfalls
from sparring.testing.toy import toy_task
from sparring.types import Fork, Group, Message, Outcome, Rollout, Score, Segment, ToolCall, ToolSpec, Trajectory

ANSWERED = Outcome(kind="completed", reason="answered")
CALL = ToolCall(id="call_0_0", name="python", arguments={"code": "1"})
MALFORMED = replace(CALL, arguments=None, raw='{"code": ')


def rollout(*replies: Message, tools: tuple[ToolSpec, ...] = (TOOL,), **of_last: object) -> Rollout:
    """A rollout of one line: prompts of 10 ids, replies of 5."""
    segments: list[Segment] = []
    for reply in replies:
        at, first = len(segments), not segments
        prompt = Message(role="user", content="?")
        told = Segment(index=at, parent=None if first else at - 1, source="prompt", tokens=(1,) * 10, message=prompt)
        said = sampled(at + 1, at, (2,) * 5, message=reply, logprobs=(-1.0,) * 5, finish_reason="stop")
        segments += [replace(told, tools=tools) if first else told, said]
    if of_last:
        segments[-1] = replace(segments[-1], **of_last)  # type: ignore[arg-type]
    trajectory = Trajectory(id="rl/0/0", task="t", role="policy", segments=tuple(segments), outcome=ANSWERED)
    return Rollout(id="rl/0/0", task=toy_task(), index=0, attempt=0, purpose="train", trajectories=(trajectory,))


def measured(*rollouts: Rollout, failed: tuple[Rollout, ...] = ()) -> dict[str, float]:
    metrics = Metrics()
    scores = tuple(Score(reward=0.0) for _ in rollouts)
    group = Group(id="rl/0", index=0, task=toy_task(), rollouts=rollouts, scores=scores, failed=failed)
    measure(metrics, group, lag=0, max_context=30)
    return metrics.take()


def says(content: str, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls)


@pytest.mark.parametrize(
    ("reply", "unread"),
    [
        (says("Done."), 0.0),
        (says("I look. <tool_call>", CALL), 0.0),
        (says("", MALFORMED), 1.0),
        (says("", MALFORMED, CALL), 0.0),
        (says("I look. <tool_call>{"), 1.0),
        (says("<function=python>\n<parameter=code>1</parameter>"), 1.0),
        (says("<｜tool▁calls▁begin｜>python"), 1.0),
        (says("<｜DSML｜invoke"), 1.0),
    ],
)
def test_a_call_that_nobody_can_read_is_counted_where_there_are_tools(reply: Message, unread: float) -> None:
    assert measured(rollout(says("Hm."), reply))["rollout/unread_calls"] == unread / 2
    without = measured(rollout(says("Hm."), reply, tools=()))["rollout/unread_calls"]
    assert without != without, "of a reply to a request without tools the text is text: there is nothing to count"


def test_a_reply_that_was_cut_is_counted_by_what_cut_it() -> None:
    """The context of 30 tokens, or another limit."""
    full, other = "rollout/cut_by_context", "rollout/cut_by_limit"
    by_context = measured(rollout(says("a"), says("b"), finish_reason="length"))
    assert (by_context[full], by_context[other]) == (0.5, 0.0)
    by_limit = measured(rollout(says("a"), finish_reason="length"), rollout(says("a")), rollout(says("b")))
    assert (by_limit[full], by_limit[other]) == (0.0, pytest.approx(1 / 3))
    group = Group(
        id="rl/0",
        index=0,
        task=toy_task(),
        rollouts=(rollout(says("a"), says("b"), finish_reason="length"),),
        scores=(Score(reward=0.0),),
    )
    assert shortfalls(group)["cut_by_limit"] == (1, 2) and "cut_by_context" not in shortfalls(group)


@pytest.mark.parametrize(
    ("scores", "equal"),
    [
        ((Score(reward=0.1 + 0.2), Score(reward=0.3)), 1.0),
        ((Score(reward=1.0), Score(reward=0.0)), 0.0),
        ((Score(reward=1.0, per_role={"policy": 0.0}), Score(reward=0.0, per_role={"policy": 0.0})), 1.0),
        ((Score(reward=0.0),), None),
    ],
)
def test_groups_whose_rewards_are_equal_are_counted(scores: tuple[Score, ...], equal: float | None) -> None:
    metrics, rollouts = Metrics(), tuple(rollout(says("a")) for _ in scores)
    measure(metrics, Group(id="rl/0", index=0, task=toy_task(), rollouts=rollouts, scores=scores), lag=0)
    assert metrics.values().get("rollout/equal_rewards") == equal


def test_rollouts_with_nothing_to_train_are_counted_and_branches_of_other_tools() -> None:
    title, good = rollout(says("A title"), label="auxiliary"), rollout(says("Yes."))
    silent = replace(title, index=2)
    cut = replace(silent.trajectories[0], segments=(), outcome=Outcome(kind="truncated", reason="context_length"))
    values = measured(good, title, failed=(replace(silent, trajectories=(cut,)),))
    assert values["rollout/nothing_to_train"] == pytest.approx(2 / 3)
    (line,) = good.trajectories
    other = replace(line.segments[0], index=2, fork=Fork(reason="tools"))
    forked = replace(good, trajectories=(replace(line, segments=(*line.segments, other)),))
    assert measured(good, forked)["rollout/branches_of_other_tools"] == 0.5


@pytest.mark.parametrize("prefix", ["rollout/", ""], ids=["training", "evaluation"])
def test_what_is_too_high_is_said_once(prefix: str) -> None:
    told: list[str] = []
    warnings = Warnings(told.append, prefix)
    for share in (0.0, 0.5, 1.0):
        warnings.look({f"{prefix}{name}": share for name in WARNED_ABOVE})
    warnings.look({})
    assert [line.partition(":")[0] for line in told] == [f"{prefix}{name}" for name in WARNED_ABOVE]
    shares = {name: 0.5 if most < 0.5 else 1.0 for name, (most, _) in WARNED_ABOVE.items()}
    assert all(f": {shares[name]:.0%} of " in line for name, line in zip(shares, told, strict=True))
    keys = {"cut_by_limit": "rollout.sampling.max_turn_tokens", "equal_rewards": "rollout.group_size"}
    assert all(key in line for name, line in zip(shares, told, strict=True) for key in [keys.get(name, "")])
