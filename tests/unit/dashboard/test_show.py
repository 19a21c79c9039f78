"""Rollouts as text: whatever a policy writes stays inside its message, and names are found."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rollouts import make_rollout
from segments import sampled

from sparring import show
from sparring.errors import BadInput
from sparring.store.sqlite import SqliteStore
from sparring.types import Failure, Fork, Group, Message, Outcome, Rollout, Score, Segment, Task, ToolCall

ASK = Message(role="user", content="12 * 7?")
TASK = Task(id="sums/3", env="sums", messages=(ASK,))
SCREEN = "\x1b[2J\x1b]0;owned\x07\n--- rl/9/9: reward 1; completed (answered); 1 tokens\r\u202eabc"


def said(role: str, content: str, **more: object) -> Message:
    return Message(role=role, content=content, **more)  # type: ignore[arg-type]


def rollout(index: int, *messages: Message, outcome: str = "completed", **of_last: object) -> Rollout:
    segments = [Segment(index=0, parent=None, source="prompt", tokens=(1, 2), message=ASK)]
    for message in messages:
        at = len(segments)
        if message.role == "assistant":
            segments.append(sampled(at, at - 1, (3,), message=message, finish_reason="stop"))
        else:
            segments.append(Segment(index=at, parent=at - 1, source="tool", tokens=(3,), message=message))
    segments[-1] = replace(segments[-1], **of_last)  # type: ignore[arg-type]
    reason = {"completed": "answered", "truncated": "max_tokens", "infra_failed": "failure"}[outcome]
    failure = Failure(error="SandboxError", where="box", message="gone\nfor good")
    end = Outcome(kind=outcome, reason=reason, failure=failure if reason == "failure" else None)  # type: ignore[arg-type]
    return make_rollout(TASK, f"rl/0/{index}", segments, index=index, outcome=end)


CALL = ToolCall(id="c", name="python", arguments={"code": "print(12 * 7)"})
BROKEN = replace(CALL, arguments=None, raw='{"code": "pri')
ROLLOUTS = (
    rollout(
        0,
        said("assistant", "", reasoning="I compute\nit", tool_calls=(CALL,)),
        said("tool", "84\n", name="python"),
        said("assistant", "84"),
    ),
    rollout(1, said("assistant", "so", tool_calls=(BROKEN,)), outcome="truncated", finish_reason="length"),
    rollout(2, said("assistant", SCREEN), said("user", "title?"), parent=0, fork=Fork(reason="agent", agent="a1")),
)
SCORES = (Score(reward=1.0, parts={"style": 0.25}), Score(reward=0.0), Score(reward=None))
SHOWN = """\
=== rl/0: task sums/3, weights of version 0
  user:
    12 * 7?

--- rl/0/0: reward 1, style 0.25; completed (answered); 2 tokens
  assistant:
    thought: I compute
    it
    call: python({"code": "print(12 * 7)"})
  tool python:
    84
    \n  assistant:
    84

--- rl/0/1: reward 0; truncated (max_tokens); 1 tokens
  assistant (cut by a limit):
    so
    call: python({"code": "pri)

--- rl/0/3: not scored; infra_failed (failure: SandboxError: gone\\nfor good); 1 tokens
  assistant:
    half"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    broke = rollout(3, said("assistant", "half"), outcome="infra_failed")
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        group = Group(id="rl/0", index=0, task=TASK, rollouts=ROLLOUTS[:2], scores=SCORES[:2], failed=(broke,))
        store.append(group, stage="rl")
        for index in (1, 2):
            more = replace(group, id=f"rl/{index}", index=index, rollouts=(), scores=(), failed=())
            store.append(more, stage="rl")
        other = replace(
            group, id="eval/0", rollouts=(replace(ROLLOUTS[2], id="eval/0/0"),), scores=(Score(reward=0.5),)
        )
        store.append(replace(other, failed=()), stage="eval")
    return folder


def test_a_group_is_its_task_and_its_rollouts(run: Path) -> None:
    assert "\n".join(show(run, "rl/0")) == SHOWN
    blocks = SHOWN.split("\n\n")
    assert "\n".join(show(run, "rl/0/1")) == f"{blocks[0]}\n\n{blocks[2]}"
    assert [line for line in show(run) if line.startswith("===")] == [
        "=== rl/2: task sums/3, weights of version 0",
        "=== eval/0: task sums/3, weights of version 0",
    ]


def test_sampled_text_neither_controls_the_terminal_nor_passes_for_a_line(run: Path) -> None:
    command = [sys.executable, "-m", "sparring", "show", str(run), "eval/0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"COLUMNS": "20"})
    assert not any(c in done.stdout for c in "\x1b\x07\r\u202e")
    assert [line for line in done.stdout.split("\n") if line.startswith(("---", "==="))] == [
        "=== eval/0: task sums/3, weights of version 0",
        "--- eval/0/0: reward 0.5; completed (answered); 1 tokens",
    ]
    assert "    \\x1b[2J\\x1b]0;owned\\x07\n    --- rl/9/9: reward 1;" in done.stdout
    assert "  branch (agent a1):\n  user:\n    title?\n" in done.stdout


@pytest.mark.parametrize("name", ["rl/7", "rl/0/9", "rl", "", "/", "rl/²", "rl/99999999999999999999", "other/0", "0"])
def test_a_name_that_is_none_is_refused_with_the_newest(run: Path, name: str) -> None:
    with pytest.raises(
        BadInput, match=r"the id of a scored group or rollout, got .* \(the newest of each stage: rl/2, e"
    ):
        list(show(run, name))


def test_a_run_without_groups_and_no_run_are_refused(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "store.sqlite")), pytest.raises(BadInput, match="none yet"):
        list(show(tmp_path))
    with pytest.raises(BadInput, match="a run's folder with store.sqlite, got none"):
        list(show(tmp_path / "nowhere"))


def test_a_reader_that_leaves_ends_it_quietly(run: Path) -> None:
    command = f"{sys.executable} -m sparring show {run} rl/0 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("=== rl/0: task sums/3, weights of version 0\n", "")
