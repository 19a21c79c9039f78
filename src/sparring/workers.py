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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparring.rewards import RewardRefused, post, send

PAUSE_S = 1.0
"""Pause before a server that did not answer is tried again."""

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

    def __init__(self, url: str, worker_key: str, shown: Mapping[str, Any]) -> None:
        self.shown = shown
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
        """Reward a turn or a branch by the id of a reply, or the rollout. Raises as `rewards.send`."""
        send(self.url, self.reward_key, reward, of, branch=branch)

    def finish(self, answer: str | None = None, *, reward: Any = NOTHING, truncated: bool = False) -> bool:
        """End the rollout.

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

    def _end(self, body: Mapping[str, Any]) -> bool:
        status, answer = post(self.url, f"/v1/rollouts/{self._id}/finish", self._worker_key, body)
        if status == 200 or status in (404, 410):
            self._over.set()
            self.finished, self.lost = status == 200, status != 200
            return self.finished
        raise RewardRefused(status, answer)

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
        patience_s: seconds for which a run that does not answer is tried again: it may be starting. One that had
            answered before is over then.

    Raises:
        RewardRefused: the key is wrong, or the run has no workers.
        OSError: the run has never answered.
    """
    body = {"environments": list(environments), "wait_s": wait_s, "worker": worker}
    answered, begun = False, time.monotonic()
    while True:
        try:
            status, answer = post(url, "/v1/rollouts/claim", key, body, timeout_s=wait_s + 30)
        except OSError:
            if time.monotonic() - begun > patience_s:
                if answered:
                    return
                raise
            time.sleep(PAUSE_S)
            continue
        answered, begun = True, time.monotonic()
        if status == 410:
            return
        if status == 204:
            continue
        if status != 200:
            raise RewardRefused(status, answer)
        rollout = ClaimedRollout(url, key, json.loads(answer))
        try:
            yield rollout
        except GeneratorExit:
            if not rollout.finished:
                rollout.fail("its worker left")
            raise
        if not rollout.finished and not rollout.lost:
            rollout.finish()
