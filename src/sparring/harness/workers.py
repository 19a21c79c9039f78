"""Harness for rollouts that external programs (workers) play: it opens the world, offers the rollout, and ends with its
worker. `record/leases.py` has the rules for claims, design/0007-workers.md the reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from sparring.errors import EnvError, HarnessError, LimitReached, Unanswered, boundary, refusal
from sparring.harness.preset import KEY
from sparring.harness.program import Address, OpenDoor, ProgramRequests
from sparring.harness.world_tools import SampledCalls, WorldTools
from sparring.protocols import Episode, Session
from sparring.record.leases import LeaseEnd, Leases, RolloutOffer
from sparring.render.dialect import message_dicts, tool_dicts
from sparring.types import Message

NAME = "workers"
"""Value of `[rollout] harness` for rollouts that workers play."""

GRACE_S = 60.0
"""Seconds for a worker to finish after its rollout hit a limit or a request was refused for good."""


class WorkerHarness:
    """Harness that lets workers play. Implements `protocols.Harness`.

    Args:
        leases: returns the run's leases, or None without a server.
        data_fields: fields of a task's data that its worker may see.
        calls_from_code: whether the workers' models write code that calls the world's tools.
        within_s: seconds in which a worker must claim a rollout; None: unlimited.
    """

    def __init__(
        self,
        open_door: OpenDoor,
        leases: Callable[[], Leases | None],
        data_fields: Sequence[str] = (),
        *,
        calls_from_code: bool = False,
        within_s: float | None = None,
    ) -> None:
        self._open_door, self._leases, self._fields = open_door, leases, tuple(data_fields)
        self._calls_from_code, self._within_s = calls_from_code, within_s

    def behind(self, open_door: OpenDoor, leases: Callable[[], Leases | None], within_s: float | None) -> WorkerHarness:
        """Return the same harness, except that its workers claim rollouts at another server. The arguments are those of
        the class."""
        return WorkerHarness(open_door, leases, self._fields, calls_from_code=self._calls_from_code, within_s=within_s)

    async def run(self, episode: Episode) -> None:
        """Let a worker play the episode.

        Raises:
            WorkerLost: the worker's lease expired.
            HarnessError: the worker reported a failure, or none claimed the rollout in time.
            LimitReached: the rollout hit a limit, or its worker reported one.
            RequestRefused: a request was refused for good, and the worker did not finish.
            EnvError: the world failed.
            Unanswered: the worker finished without a reply or a limit.
            BadInput: the run has no server for workers.
        """
        leases = self._leases()
        if leases is None:
            raise refusal(KEY, "a run that serves workers", "none", "play it by `sparring run` or `sparring eval`")
        with boundary(EnvError, f"environment {episode.task.env}, task {episode.task.id}: open"):
            observation = await episode.env.open(episode.task, episode.box)
        if observation.done:
            return
        calls = SampledCalls(episode.task.limits.max_tool_calls, from_code=self._calls_from_code)
        session = episode.session()
        requests, tools = ProgramRequests(session, calls), WorldTools(episode.env, calls)
        async with AsyncExitStack() as stack:
            stack.enter_context(session.layered(requests))
            with episode.queue():  # the wait for the gateway has no time limit
                door = await stack.enter_async_context(self._open_door(session))
            door.tools = tools if episode.env.tools else None
            view = self._worker_view(episode, door, session, (*episode.task.messages, *observation.messages))
            with leases.offer(episode.task.env, view, session.rewards) as offer:
                with episode.queue():
                    await _wait_for_claim(offer, self._within_s)
                try:
                    end = await _wait_for_end(offer, requests)
                finally:
                    episode.note("program", _note_of(offer, requests))
        _judge(end, offer, requests)
        last = session.last_words if end.answer is None else Message(role="assistant", content=end.answer)
        if last is not None:
            await tools.answer(last, of=session.last_words)

    def _worker_view(
        self, episode: Episode, door: Address, session: Session, messages: Sequence[Message]
    ) -> Mapping[str, Any]:
        task = episode.task
        limits = {name: getattr(task.limits, name) for name in ("max_turns", "max_tokens", "max_tool_calls")}
        return {
            "rollout": episode.id,
            "environment": task.env,
            "task": task.id,
            "messages": message_dicts(messages),
            "tools": tool_dicts(episode.env.tools),
            "hosts_tools": bool(episode.env.tools),
            "limits": {**limits, "context": session.max_context, "reply": session.max_reply},
            "data": {name: task.data[name] for name in self._fields if name in task.data},
            "key": door.key,
            "reward_key": door.reward_key,
        }


async def _wait_for_claim(offer: RolloutOffer, within_s: float | None) -> None:
    """Wait until a worker claims a rollout. Raises HarnessError if none does within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            await offer.claimed.wait()
    except TimeoutError:
        raise HarnessError(f"no worker has claimed it in {within_s:g} s") from None


async def _wait_for_end(offer: RolloutOffer, requests: ProgramRequests) -> LeaseEnd:
    """Return the end of a rollout. If its worker does not finish soon after a limit or a refusal, raise the limit or
    the refusal instead.

    Raises:
        WorkerLost: the lease expired.
    """
    end = await requests.awaited(offer.ended(), GRACE_S)
    cause = requests.limit or requests.refused
    if end is None and cause is not None:
        raise cause
    assert end is not None, "only these two end the wait"
    return end


def _judge(end: LeaseEnd, offer: RolloutOffer, requests: ProgramRequests) -> None:
    """Raise the error that the end of a rollout stands for, if any.

    Raises:
        HarnessError: the worker failed.
        Unanswered: no request was answered.
        LimitReached: the rollout or the worker hit a limit.
    """
    worker = f"worker {offer.worker or 'without a name'}"
    if end.outcome == "failed":
        raise HarnessError(f"{worker}: {end.reason}")
    if requests.unanswered:
        raise Unanswered(f"{worker}: finished and {requests.unanswered}")
    if requests.limit is not None:
        raise requests.limit
    if end.outcome == "truncated":
        raise LimitReached("timeout", f"{worker}: {end.reason or 'a limit of its own'}")


def _note_of(offer: RolloutOffer, requests: ProgramRequests) -> dict[str, Any]:
    outcome, reason = ("lost", "") if offer.end is None else (offer.end.outcome, offer.end.reason)
    end = {"harness": NAME, "worker": offer.worker, "outcome": outcome, "reason": reason}
    return {**end, "requests": requests.requests, "unsampled_calls": requests.calls.unsampled}
