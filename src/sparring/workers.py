"""Client for programs elsewhere that play the rollouts of a run. It needs the standard library alone: a program without
Sparring may have a copy of this file and of `rewards.py`, both in a folder named `sparring`.

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
"""Pause before a server that did not answer is tried again."""

UNAVAILABLE = 503
"""Status of a run that cannot answer at the moment."""

NOTHING = object()


class ClaimedRollout:
    """Rollout that this program plays until it finishes it. Its lease is renewed by a thread.

    Attributes:
        shown: all that the run shows of it, as plain data.
        rollout: id of it.
        environment, task: name and id.
        messages, tools: of its prompt, in the form of chat completions.
        data: fields of the task that the recipe shows.
        base_url, key: of the model, for a client of OpenAI's; `url` is the same without `/v1`.
        mcp: address of the world's tools, under the same key; None where it has none.
        lost: whether the lease has run out: the rollout is another's.
        finished: whether it was finished here.
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
        """Reward a turn or a branch by the id of a reply, or the rollout. A run that does not answer is tried again for
        `patience_s`. Raises as `rewards.send`."""

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
        """End the rollout. A run that does not answer is tried again for `patience_s`: the same end twice is one.

        Args:
            answer: last words to the world; None: the policy's latest reply that called nothing.
            reward: of the rollout, where the run takes rewards from outside; None: it is not scored.
            truncated: whether a limit of this program's own was hit.

        Returns:
            Whether it counts: False where the lease has run out.

        Raises:
            RewardRefused: the run takes no rewards, or this is none.
            OSError: the run does not answer.
        """
        body = {"outcome": "truncated" if truncated else "completed", "answer": answer}
        return self._end(body if reward is NOTHING else {**body, "reward": reward})

    def fail(self, reason: str) -> bool:
        """Give the rollout back: it could not be played, and is played again. Returns and raises as `finish`."""
        return self._end({"outcome": "failed", "reason": reason or "no reason"})

    def leave(self, reason: str) -> None:
        """Give the rollout back if the run answers; else its lease runs out."""
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
        """Return the status and the answer of a request, which is made until the run answers.

        Raises:
            RewardRefused: the run said to the last that it cannot answer.
            OSError: it did not answer.
        """
        begun = time.monotonic()
        while True:
            error: Exception
            try:
                status, answer = ask()
                if status != UNAVAILABLE:
                    return status, answer
                error = RewardRefused(status, answer)
            except OSError as problem:
                error = problem
            if time.monotonic() - begun >= self._patience_s:
                raise error
            time.sleep(PAUSE_S)

    def _renew(self, pause_s: float) -> None:
        """Renew the lease until the rollout is over or the lease is lost."""
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
    """Yield rollouts to play, one after another, until the run is over. One that is not finished when the next is
    wanted is finished then; where the loop is left, it is given back.

    Args:
        url: of the run's server (`keys.json` in its folder).
        key: the run's worker key (the same file).
        environments: of which rollouts are wanted; empty: any.
        worker: name of this program, for the run's reports.
        wait_s: longest wait of one request, in seconds.
        patience_s: seconds for which a run that does not answer is tried again, also by the rollouts: it may be
            starting, and so may its gateway. One that had answered before is over then.

    Raises:
        RewardRefused: the key is wrong, the run has no workers, or there is a gateway and no run.
        OSError: the run has never answered.
    """
    body: dict[str, Any] = {"environments": list(environments), "wait_s": wait_s, "worker": worker}
    answered, begun = False, time.monotonic()
    while True:
        body.setdefault("id", uuid.uuid4().hex)  # kept where no answer comes: the claim is the same then
        try:
            status, answer = post(url, "/v1/rollouts/claim", key, body, timeout_s=wait_s + 30)
            if status == UNAVAILABLE and not answered and time.monotonic() - begun > patience_s:
                raise RewardRefused(status, answer)
        except OSError:
            status, answer = UNAVAILABLE, ""
            if not answered and time.monotonic() - begun > patience_s:
                raise
        if status == UNAVAILABLE:
            if time.monotonic() - begun > patience_s:
                return
            time.sleep(PAUSE_S)
            continue
        answered, begun = True, time.monotonic()
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
