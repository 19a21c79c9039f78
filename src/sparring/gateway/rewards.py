"""Rewards by HTTP: `POST /v1/rewards` under the reward key of a rollout, which lives until it is scored, or the run's.

The key under which a rollout samples gives none, unless the recipe says so: whoever has it may be the policy.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sparring.errors import BadInput, SparringError, refusal
from sparring.gateway.dialects.dialect import NO_RETRY, body_of
from sparring.gateway.dialects.handles import unsealed
from sparring.gateway.keys import KeyTable, WrongKey, key_of, wrong_key
from sparring.gateway.reading import read_body
from sparring.record.rewards import (
    OutsideReward,
    OutsideRewards,
    RewardConflict,
    RewardExpired,
    RewardsClosed,
    UnknownReply,
)
from sparring.types import Message

MOST_BYTES = 1 << 20
"""Largest body of a reward."""

MOST_EXPIRED = 4096
"""Keys of scored rollouts that are remembered, so that a late reward is answered as such."""

Conversation = Callable[[str], "tuple[Message, ...] | None"]
"""Gives the conversation up to a reply, by its id; None for an unknown one."""

STATUSES: tuple[tuple[type[SparringError], int, str], ...] = (
    (WrongKey, 401, "wrong_key"),
    (UnknownReply, 404, "unknown_reply"),
    (RewardConflict, 409, "conflict"),
    (RewardExpired, 410, "expired"),
    (RewardsClosed, 403, "no_rewards"),
    (BadInput, 400, "invalid_request"),
)


class RewardDesk:
    """Rewards of the rollouts behind the doors of one server, by key.

    Args:
        doors: those that are open, by key.

    Attributes:
        run_key: of the run, under which any rollout is rewarded by its id; empty for none.
    """

    def __init__(self, doors: KeyTable[Any]) -> None:
        self._doors = doors
        self.run_key = ""
        self._ids: dict[str, str] = {}
        self._awaited: KeyTable[tuple[OutsideRewards, Conversation]] = KeyTable()
        self._expired: KeyTable[OutsideRewards] = KeyTable()

    @property
    def awaits(self) -> bool:
        """True while a rollout awaits its rewards."""
        return len(self._awaited) > 0

    def knows(self, key: str) -> bool:
        """Return whether a key is one of rewards, or of a door."""
        return self._is_runs(key) or any(key in table for table in (self._awaited, self._expired, self._doors))

    def _is_runs(self, key: str) -> bool:
        return bool(self.run_key) and secrets.compare_digest(key.encode(), self.run_key.encode())

    def open(self, key: str, rewards: OutsideRewards, conversation: Conversation) -> None:
        """Take rewards under a key until they are closed; under the run's by the rollout's id."""
        self._awaited[key] = rewards, conversation
        self._ids[rewards.trajectory] = key

    def close(self, key: str) -> None:
        """Answer rewards under a key that they are late."""
        awaited = self._awaited.pop(key)
        assert awaited is not None, "it was opened"
        self._expired[key] = awaited[0]
        if len(self._expired) > MOST_EXPIRED:
            self._ids.pop(self._expired.pop_oldest().trajectory, None)

    async def endpoint(self, request: Request) -> Response:
        """Answer a request: 200 when the reward is durable."""
        try:
            key = key_of(request)
            if not self.knows(key):
                raise wrong_key("one of no rollout, or of one that is long over")
            reward = self._take(key, await read_body(request, MOST_BYTES))
        except ClientDisconnect:
            return Response(status_code=499)
        except SparringError as error:
            return refused(error)
        body = {"reward": reward.reward, "of": reward.of, "branch": reward.branch, "final": reward.ends}
        return Response(msgspec.json.encode(body), media_type="application/json")

    def _take(self, key: str, data: bytes) -> OutsideReward:
        """Take the reward that a body describes, and return it."""
        if self._is_runs(key):
            key, data = self._of_run(data)
        rewards, conversation = self._awaited.get(key) or (self._expired.get(key), None)
        if rewards is None and key in self._doors:
            do = "send it under the rollout's reward key, in a recipe with rollout.rewards_within_s"
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
        """Return the reward key of the rollout that a body under the run's key names, and the rest of the body.

        Raises:
            BadInput: it names none.
            UnknownReply: no such rollout awaits rewards.
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
    """Return the id of a reply by the id that its answer bore in any dialect."""
    bare = id.removeprefix("chatcmpl-").removeprefix("msg_").removeprefix("resp_")
    return unsealed(bare.partition(".")[0]) or bare


def _read(data: bytes) -> OutsideReward:
    """Return the reward that a body describes.

    Raises:
        BadInput: it describes none.
    """
    body = body_of(data)
    if isinstance(body.get("of"), str):
        body = {**body, "of": reply_id(body["of"])}
    try:
        return msgspec.convert(body, OutsideReward)
    except (msgspec.ValidationError, OverflowError) as error:
        raise refusal("body", "a reward", str(error), "correct the request") from None


def refused(error: SparringError, statuses: tuple[tuple[type[SparringError], int, str], ...] = STATUSES) -> Response:
    """Return the answer to a reward, or another word of a program elsewhere, that does not count.

    Args:
        error: the reason.
        statuses: class of an error, status and name in the answer; the first that fits. Others are 503.
    """
    status, kind, headers = 503, "not_stored", {"retry-after": "1"}
    for type_of_error, code, name in statuses:
        if isinstance(error, type_of_error):
            status, kind, headers = code, name, NO_RETRY
            break
    body = {"error": {"type": kind, "message": str(error)}}
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)
