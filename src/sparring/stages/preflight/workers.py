"""Check of workers: before the run a worker of this check, or the user's own, plays a task."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.rewards import post
from sparring.stages.context import Context
from sparring.stages.data.demonstrations import Demonstrations
from sparring.types import Message, Task
from sparring.workers import ClaimedRollout, claim

NAME = "check"
"""Name of this check's own worker."""


class Rehearsal:
    """Player of workers' rollouts before the run.

    Args:
        command: command of the user's worker; empty: this check's own worker plays.

    Attributes:
        own_tools: tools that replies called and the environment lacks; the user's worker may have them.
        is_idle: whether this check's worker requests no reply.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = tuple(command)
        self.own_tools: set[str] = set()
        self.is_idle = False

    @property
    def who(self) -> str:
        """Description of the player for messages."""
        return f"the worker {shlex.join(self.command)}" if self.command else "a worker of this check"

    def play(self, url: str, key: str) -> None:
        """Play all rollouts that can be claimed until the run is over. Blocks."""
        for rollout in claim(url, key, worker=NAME, patience_s=0.0):
            if self.is_idle:
                rollout.finish("done")
            else:
                self._play(rollout)

    def _play(self, rollout: ClaimedRollout) -> None:
        messages, world = list(rollout.messages), {tool["function"]["name"] for tool in rollout.tools}
        tools = {"tools": rollout.tools} if rollout.tools else {}
        while True:
            body = {"model": rollout.shown["model"], "messages": messages, **tools}
            status, answer = post(rollout.url, "/v1/chat/completions", rollout.key, body)
            if status != 200:
                break
            reply = json.loads(answer)["choices"][0]["message"]
            calls = reply.get("tool_calls") or ()
            if own := {call["function"]["name"] for call in calls} - world:
                self.own_tools |= own
                rollout.fail(f"the world has no tool {', '.join(sorted(own))}")
                return
            messages += [reply, *(_answer_call(rollout, call) for call in calls)]
            if not calls:
                break
        rollout.finish()


def _answer_call(rollout: ClaimedRollout, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        wanted = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    except ValueError:
        text = "error: the arguments are no JSON"
    else:
        body = {"jsonrpc": "2.0", "id": call["id"], "method": "tools/call", "params": wanted}
        status, answer = post(rollout.url, "/mcp", rollout.key, body)
        text = _text_of(json.loads(answer)) if status == 200 else answer
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _text_of(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"]["message"])
    return "\n".join(part["text"] for part in answer["result"]["content"])


async def check_idle(context: Context, task: Task, rehearsal: Rehearsal) -> None:
    """Refuse a run that gives a score to a worker without any request."""
    rehearsal.is_idle = True
    try:
        played = await Demonstrations(context).play(task, lambda messages: Message(role="assistant", content=""))
    except BadInput:  # no request is a failure, which has no reward
        return
    finally:
        rehearsal.is_idle = False
    score = played[0].score
    actual = f"one with reward {None if score is None else score.reward}"
    raise refusal(f"task {task.id}", "no rollout of a worker that asks for nothing", actual, "correct the harness")
