"""Endpoint for rewards: `POST /v1/rewards`, under a rollout's reward key, which is valid until the rollout is scored,
or under the run's reward key.

The key with which a client samples cannot give rewards unless the recipe allows it, because the policy itself may know
that key.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.errors import refusal
from sparring.gateway.body_reader import read_body, read_form
from sparring.gateway.dialects.fields import body_of
from sparring.gateway.dialects.handles import reply_named
from sparring.gateway.keys import KeyTable, key_of, wrong_key
from sparring.gateway.refusals import json_response
from sparring.record.rewards import (
    OutsideReward,
    OutsideRewards,
    RewardsClosed,
    UnknownReply,
)
from sparring.types import Message

MOST_BYTES = 1 << 20
"""Maximum number of bytes of a reward."""

MOST_EXPIRED = 4096
"""Maximum number of keys of scored rollouts that are kept, so that a late reward is recognised as late."""

Conversation = Callable[[str], "tuple[Message, ...] | None"]
"""Function from a reply id to the conversation up to that reply; None for an unknown id."""


class RewardRoutes:
    """Rewards of the rollouts of one server, by key.

    Attributes:
        run_key: reward key of the run, which rewards any rollout by its id; empty if there is no such key.
    """

    def __init__(self, doors: KeyTable[Any]) -> None:
        self._doors = doors
        self.run_key = ""
        self._ids: dict[str, str] = {}
        self._awaited: KeyTable[tuple[OutsideRewards, Conversation]] = KeyTable()
        self._expired: KeyTable[OutsideRewards] = KeyTable()

    @property
    def awaits(self) -> bool:
        """Whether a rollout waits for rewards."""
        return len(self._awaited) > 0

    def _knows(self, key: str) -> bool:
        return self._is_runs(key) or any(key in table for table in (self._awaited, self._expired, self._doors))

    def _is_runs(self, key: str) -> bool:
        return bool(self.run_key) and secrets.compare_digest(key.encode(), self.run_key.encode())

    def open(self, key: str, rewards: OutsideRewards, conversation: Conversation) -> None:
        """Accept rewards under a key until `close`, and under the run's key with the id of the rollout."""
        self._awaited[key] = rewards, conversation
        self._ids[rewards.trajectory] = key

    def close(self, key: str) -> None:
        """Answer further rewards under a key with `RewardExpired`."""
        awaited = self._awaited.pop(key)
        assert awaited is not None, "it was opened"
        self._expired[key] = awaited[0]
        if len(self._expired) > MOST_EXPIRED:
            self._ids.pop(self._expired.pop_oldest().trajectory, None)

    async def answer(self, request: Request) -> Response:
        """Answer a request; status 200 means that the reward is durable."""
        key = key_of(request)
        if not self._knows(key):
            raise wrong_key("one of no rollout, or of one that is long over")
        reward = self._take(key, await read_body(request, MOST_BYTES))
        body = {"reward": reward.reward, "of": reward.of, "branch": reward.branch, "final": reward.ends}
        return json_response(body)

    def _take(self, key: str, data: bytes) -> OutsideReward:
        if self._is_runs(key):
            key, data = self._of_run(data)
        rewards, conversation = self._awaited.get(key) or (self._expired.get(key), None)
        if rewards is None and key in self._doors:
            do = "send it under the rollout's reward key, in a recipe with rollout.rewards.within_s"
            raise RewardsClosed(str(refusal("reward", "none under the key that samples", "one", do)))
        if rewards is None:
            raise wrong_key("one of no rollout, or of one that is long over")
        reward = _read(data)
        if conversation is not None and reward.of is not None and conversation(reward.of) is None:
            do = "send the id that the reply bore under this key"
            raise UnknownReply(str(refusal("of", "the id of a reply of this rollout", repr(reward.of), do)))
        rewards.give(reward)
        return reward

    def _of_run(self, data: bytes) -> tuple[str, bytes]:
        """Read the rollout that a body under the run's key names. Return the rollout's reward key and the rest of the
        body.

        Raises:
            BadInput: the body names no rollout.
            UnknownReply: the rollout never waited for rewards, or was scored long ago.
        """
        body = body_of(data)
        rollout, of = body.pop("rollout", None), body.get("of")
        if rollout is None and isinstance(of, str):
            rollout = reply_id(of).rpartition("#")[0]
        if not isinstance(rollout, str):
            raise refusal("rollout", "the id of a rollout", repr(rollout), "name the rollout, or a reply of it as `of`")
        if rollout not in self._ids:
            do = "send the id that its replies begin with"
            raise UnknownReply(str(refusal("rollout", "one that awaits rewards", repr(rollout), do)))
        return self._ids[rollout], msgspec.json.encode(body)


def reply_id(id: str) -> str:
    """Convert a reply's id in any dialect to the session's id of that reply."""
    bare = id.removeprefix("chatcmpl-").removeprefix("msg_").removeprefix("resp_")
    return reply_named(bare.partition(".")[0]) or bare


def _read(data: bytes) -> OutsideReward:
    body = body_of(data)
    if isinstance(body.get("of"), str):
        body = {**body, "of": reply_id(body["of"])}
    return read_form(body, OutsideReward, "a reward")
