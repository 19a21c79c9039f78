"""Client for external programs (workers) that play the rollouts of a run. It needs only the standard library, so a
program without Sparring can use a copy of this file and of `rewards.py`, both in a folder named `sparring`.

    for rollout in claim(url, key):
        client = openai.OpenAI(base_url=rollout.base_url, api_key=rollout.key)
        ...
        rollout.finish(reward=1.0)
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sparring.rewards import RewardRefused, post, send

PAUSE_S = 1.0
"""Pause before a request to a server that did not answer is retried, in seconds."""

UNAVAILABLE = 503
"""HTTP status of a run that cannot answer at the moment."""

NOTHING = object()


class ClaimedRollout:
    """Rollout that this program has claimed and plays. A thread renews its lease.

    Attributes:
        shown: description of the rollout from the run, as plain data.
        rollout: id of the rollout.
        environment, task: name of the environment and id of the task.
        messages, tools: prompt and its tools, in the format of chat completions.
        data: fields of the task that the recipe shares with workers.
        base_url, key: address and key of the model, for a client of OpenAI's API; `url` is the address without `/v1`.
        mcp: address of the world's tools, with the same key; None for a world without tools.
        lost: True if the lease has expired, so another worker has the rollout.
        finished: True once this program has finished the rollout.
    """

    def __init__(self, url: str, worker_key: str, shown: Mapping[str, Any], patience_s: float = 60.0) -> None:
        self.shown, self._patience_s = shown, patience_s
        self.url = url.rstrip("/").removesuffix("/v1")
        self.base_url = f"{self.url}/v1"
        self.key, self.reward_key = shown["key"], shown["reward_key"]
        self.rollout, self.environment, self.task = shown["rollout"], shown["environment"], shown["task"]
        self.messages, self.tools, self.data = shown["messages"], shown["tools"], shown["data"]
        self.mcp = f"{self.url}/mcp" if "mcp" in shown else None
        self.lost = self.finished = False
        self._worker_key, self._id = worker_key, shown["id"]
        self._over = threading.Event()
        threading.Thread(target=self._renew, args=(shown["lease_s"] / 3,), daemon=True).start()

    def reward(self, reward: float, of: str | None = None, *, branch: bool = False) -> None:
        """Send a reward for a turn or a branch, by the id of a reply, or for the rollout. Requests are retried for
        `patience_s` seconds if the run does not answer. Raises the errors of `rewards.send`."""

        def give() -> tuple[int, str]:
            try:
                send(self.url, self.reward_key, reward, of, branch=branch)
            except RewardRefused as error:
                if error.status == UNAVAILABLE:
                    return error.status, str(error)
                raise
            return 200, ""

        self._persist(give)

    def finish(self, answer: str | None = None, *, reward: Any = NOTHING, truncated: bool = False) -> bool:
        """End the rollout. The request is retried for `patience_s` seconds if the run does not answer, and has no
        further effect if repeated.

        Args:
            answer: final message to the world; None: the policy's latest reply without tool calls.
            reward: reward of the rollout, in a run that takes external rewards; None: not scored.
            truncated: True if a limit of this program was hit.

        Returns:
            True if the run accepted it; False if the lease has expired.

        Raises:
            RewardRefused: the run takes no rewards, or refused this one.
            OSError: the run does not answer.
        """
        body = {"outcome": "truncated" if truncated else "completed", "answer": answer}
        return self._end(body if reward is NOTHING else {**body, "reward": reward})

    def fail(self, reason: str) -> bool:
        """Give the rollout back because it could not be played; the run retries it. Returns and raises as `finish`."""
        return self._end({"outcome": "failed", "reason": reason or "no reason"})

    def leave(self, reason: str) -> None:
        """Give the rollout back in a single attempt; if the run does not answer, the lease expires."""
        self._patience_s = 0.0
        with suppress(OSError, RewardRefused):
            self.fail(reason)
        self._over.set()

    def _end(self, body: Mapping[str, Any]) -> bool:
        path = f"/v1/rollouts/{self._id}/finish"
        status, answer = self._persist(lambda: post(self.url, path, self._worker_key, body))
        if status == 200 or status in (404, 410):
            self._over.set()
            self.finished, self.lost = status == 200, status != 200
            return self.finished
        raise RewardRefused(status, answer)

    def _persist(self, ask: Callable[[], tuple[int, str]]) -> tuple[int, str]:
        """Repeat a request until the run answers or the patience ends, and return status and answer.

        Raises:
            RewardRefused: the run was unavailable to the end.
            OSError: the run did not answer.
        """
        started = time.monotonic()
        while True:
            error: Exception
            try:
                status, answer = ask()
                if status != UNAVAILABLE:
                    return status, answer
                error = RewardRefused(status, answer)
            except OSError as problem:
                error = problem
            if time.monotonic() - started >= self._patience_s:
                raise error
            time.sleep(PAUSE_S)

    def _renew(self, pause_s: float) -> None:
        while not self._over.wait(pause_s):
            try:
                status, _ = post(self.url, f"/v1/rollouts/{self._id}/renew", self._worker_key, {})
            except OSError:
                continue
            if status in (401, 404, 410):
                self.lost = True
                return


def claim(
    url: str,
    key: str,
    *,
    environments: Sequence[str] = (),
    worker: str = "",
    wait_s: float = 20.0,
    patience_s: float = 60.0,
) -> Iterator[ClaimedRollout]:
    """Yield rollouts to play, one after another, until the run ends.

    A rollout that the loop's body did not finish is finished before the next one, or given back if the loop is left.

    Args:
        url: address of the run's server (`keys.json` in its folder).
        key: worker key of the run (same file).
        environments: names of the environments to play; empty is any.
        worker: name of this program, for the run's reports.
        wait_s: longest wait of one request, in seconds.
        patience_s: time for which requests, also during rollouts, are retried while the run does not answer, in
            seconds. A run that is silent for longer after its first answer has ended.

    Raises:
        RewardRefused: the key is wrong, the run has no workers, or there is a gateway without a run.
        OSError: the run has never answered.
    """
    body: dict[str, Any] = {"environments": list(environments), "wait_s": wait_s, "worker": worker}
    answered, started = False, time.monotonic()
    while True:
        body.setdefault("id", uuid.uuid4().hex)  # a retry without an answer repeats the same claim
        try:
            status, answer = post(url, "/v1/rollouts/claim", key, body, timeout_s=wait_s + 30)
            if status == UNAVAILABLE and not answered and time.monotonic() - started > patience_s:
                raise RewardRefused(status, answer)
        except OSError:
            status, answer = UNAVAILABLE, ""
            if not answered and time.monotonic() - started > patience_s:
                raise
        if status == UNAVAILABLE:
            if time.monotonic() - started > patience_s:
                return
            time.sleep(PAUSE_S)
            continue
        answered, started = True, time.monotonic()
        del body["id"]
        if status == 410:
            return
        if status == 204:
            continue
        if status != 200:
            raise RewardRefused(status, answer)
        rollout = ClaimedRollout(url, key, json.loads(answer), patience_s)
        try:
            yield rollout
        except GeneratorExit:
            if not rollout.finished and not rollout.lost:
                rollout.leave("its worker left")
            raise
        if not rollout.finished and not rollout.lost:
            rollout.finish()
