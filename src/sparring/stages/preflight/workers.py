"""Preflight of workers: none is there before the run, so one of the check's own plays, or one that the user names."""

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
"""Name of the check's own worker."""


class Rehearsal:
    """Players of the rollouts of workers before the run.

    Args:
        command: of the user's worker; empty: the check's own plays.

    Attributes:
        own_tools: tools that replies called and the world lacks: the user's worker has them, the check's has not.
        is_idle: whether the check's worker asks for nothing.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = tuple(command)
        self.own_tools: set[str] = set()
        self.is_idle = False

    @property
    def who(self) -> str:
        """The player in words."""
        return f"the worker {shlex.join(self.command)}" if self.command else "a worker of this check"

    def play(self, url: str, key: str) -> None:
        """Play what there is to claim until the run is over, as the check's worker. Blocks.

        Args:
            url: of the run's server.
            key: of workers.

        Raises:
            OSError, RewardRefused: the server is gone.
        """
        for rollout in claim(url, key, worker=NAME, patience_s=0.0):
            if self.is_idle:
                rollout.finish("done")
            else:
                self._play(rollout)

    def _play(self, rollout: ClaimedRollout) -> None:
        """Ask until a reply calls nothing, or a request is refused: what that means, the run knows."""
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
    """Run a call of a reply in the world; return the message that answers it."""
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
    """Refuse a run in which a worker that asks for nothing has a rollout that counts.

    Raises:
        BadInput: it has.
    """
    rehearsal.is_idle = True
    try:
        held = await Demonstrations(context).played(task, lambda messages: Message(role="assistant", content=""))
    except BadInput:  # it was answered nothing: a failure, which has no reward
        return
    finally:
        rehearsal.is_idle = False
    score = held[0].score
    got = f"one with reward {None if score is None else score.reward}"
    raise refusal(f"task {task.id}", "no rollout of a worker that asks for nothing", got, "correct the harness")
