"""Rollouts that workers play, on a virtual clock: a worker that does not finish is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from virtual import on_virtual_clock

from sparring.errors import BadInput, HarnessError, LimitReached, RequestRefused, SparringError, Unanswered
from sparring.harness.by_environment import HarnessByEnvironment, behind
from sparring.harness.chat import ChatHarness
from sparring.harness.workers import GRACE_S, WorkerHarness
from sparring.record.leases import LeaseEnd, Leases
from sparring.record.transcript import TextRecorder, TextRequest
from sparring.reply import ReplyRequest, whole_reply
from sparring.rollout.episode import RunningEpisode
from sparring.rollout.guarded_env import GuardedEnv
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyEnv, toy_task
from sparring.types import Limits, Message


@dataclass
class Door:
    """A door of this process: the worker asks its session without HTTP."""

    session: Any
    url: str = ""
    key: str = "key"
    reward_key: str = ""
    tools: Any = None


class Played:
    """A rollout whose worker asks until it is refused. Then it finishes, or never does."""

    def __init__(self, *, refuses: SparringError | None, finishes: bool, asks: bool = True) -> None:
        self._refuses, self._finishes, self._asks = refuses, finishes, asks
        self._doors: list[Door] = []

    @asynccontextmanager
    async def _open_door(self, session: Any, **settings: Any) -> AsyncIterator[Door]:
        self._doors.append(Door(session))
        yield self._doors[-1]

    async def _reply(self, request: TextRequest) -> Message:
        if self._refuses:
            raise self._refuses
        return Message(role="assistant", content="One.")

    async def _work(self, leases: Leases) -> None:
        lease = await leases.claim((), 5.0)
        assert lease is not None
        messages = [Message(role="user", content="Go.")]
        try:
            while self._asks:
                reply = await whole_reply(self._doors[0].session.reply(ReplyRequest(messages)))
                messages += [reply.message, Message(role="user", content="Go on.")]
        except SparringError:
            pass
        if self._finishes:
            leases.finish(lease.id, LeaseEnd(outcome="completed"))

    async def run(self) -> None:
        leases, task = Leases(1e6), toy_task(3, limits=Limits(max_turns=2))
        recorder = TextRecorder(self._reply, "teacher")
        episode = RunningEpisode(task, GuardedEnv(ToyEnv), recorder, rollout_id="r", seed=1)
        working = asyncio.create_task(self._work(leases))
        await WorkerHarness(self._open_door, lambda: leases).run(episode)
        await working


@pytest.mark.parametrize(
    ("refuses", "error", "message"),
    [(RequestRefused("402: pay first"), RequestRefused, "pay first"), (None, LimitReached, "2 turns are used up")],
    ids=["refused", "limit"],
)
def test_a_worker_that_does_not_finish_after_a_limit_is_given_up(
    refuses: SparringError | None, error: type, message: str
) -> None:
    async def main() -> float:
        with pytest.raises(error, match=message):
            await Played(refuses=refuses, finishes=False).run()
        return asyncio.get_running_loop().time()

    assert run_virtual(main())[1] == GRACE_S


def test_a_worker_that_finishes_after_a_limit_ends_by_it_at_once() -> None:
    async def main() -> None:
        with pytest.raises(LimitReached, match="2 turns are used up"):
            await Played(refuses=None, finishes=True).run()

    assert run_virtual(main())[1] < GRACE_S


@pytest.mark.parametrize(
    ("asks", "told"),
    [(False, "finished and requested no reply"), (True, "refused every request, the last for: tools: expected none")],
)
@on_virtual_clock
async def test_a_worker_that_got_no_answer_fails_with_the_refusals(asks: bool, told: str) -> None:
    with pytest.raises(Unanswered, match=told):
        await Played(refuses=BadInput("tools: expected none"), finishes=True, asks=asks).run()


def test_a_rollout_that_no_worker_claims_in_time_fails() -> None:
    """Of several environments too."""
    nobody, chat = Played(refuses=None, finishes=False), ChatHarness()
    workers = WorkerHarness(nobody._open_door, lambda: None)
    leases = Leases(1e6)
    several = behind(HarnessByEnvironment({"toy": workers, "chat": chat}), nobody._open_door, lambda: leases, 5.0)
    assert behind(chat, nobody._open_door, lambda: leases) is chat

    async def main() -> None:
        task = toy_task(3)
        recorder = TextRecorder(nobody._reply, "teacher")
        episode = RunningEpisode(task, GuardedEnv(ToyEnv), recorder, rollout_id="r", seed=1)
        with pytest.raises(HarnessError, match="no worker has claimed it in 5 s"):
            await several.run(episode)

    assert run_virtual(main())[1] == 5.0
