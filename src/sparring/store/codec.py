"""MessagePack codec of `sparring.types`. Floats are stored as 64 bits, so a log-probability is restored to the bit.

User values in `Task.data`, `ToolCall.arguments` or `Store.put` are plain data: None, bool, int of any size, float, str,
bytes, lists and string-keyed mappings. A tuple is restored as a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from threading import Lock
from typing import Any, TypeVar, cast

import msgspec

from sparring.generation import NumberRow
from sparring.store.deltas import Shared, with_shared, without_shared
from sparring.types import Group, Purpose, Rollout, Score, Task, Trajectory

SCHEMA_VERSION = 1
"""Version of the file format, raised with every change to this encoding or to the tables of `schema.py`."""

BIG_INT = 1
"""MessagePack extension code of an integer beyond 64 bits, written in decimal."""

T = TypeVar("T")


def _plain(value: Any) -> Any:
    """Convert a row of numbers to a form that msgspec encodes."""
    if type(value) is NumberRow:
        return value.tolist()
    raise TypeError(f"expected plain data, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_making = Lock()
"""Lock while a decoder is made: msgspec attaches its description of a class to the class before that description is
complete, and a thread that decodes with an incomplete one crashes the process."""


class StoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout as it is stored. `task` is None if the rollout has its group's task. Ids that a branch shares with the
    branch that it leaves are left out: `shared[t]` locates them, by segment of trajectory t. `shared` is empty if no
    trajectory has such ids."""

    id: str
    task: Task | None
    index: int
    attempt: int
    purpose: Purpose
    trajectories: tuple[Trajectory, ...]
    shared: tuple[dict[int, Shared], ...] = ()

    @staticmethod
    def of(rollout: Rollout, group_task: Task) -> StoredRollout:
        """Return the stored form of a rollout of `group_task`."""
        stored = [without_shared(trajectory.segments) for trajectory in rollout.trajectories]
        forked = any(shared for _, shared in stored)
        return StoredRollout(
            id=rollout.id,
            task=None if rollout.task is group_task or rollout.task == group_task else rollout.task,
            index=rollout.index,
            attempt=rollout.attempt,
            purpose=rollout.purpose,
            trajectories=tuple(
                replace(trajectory, segments=segments) if shared else trajectory
                for trajectory, (segments, shared) in zip(rollout.trajectories, stored, strict=True)
            ),
            shared=tuple(shared for _, shared in stored) if forked else (),
        )

    def rollout(self, group_task: Task) -> Rollout:
        """Return the decoded rollout."""
        return Rollout(
            id=self.id,
            task=self.task or group_task,
            index=self.index,
            attempt=self.attempt,
            purpose=self.purpose,
            trajectories=tuple(
                replace(trajectory, segments=with_shared(trajectory.segments, shared)) if shared else trajectory
                for trajectory, shared in zip_longest(self.trajectories, self.shared)
            ),
        )


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Group without its rollouts, which have rows of their own."""

    id: str
    index: int
    task: Task
    scores: tuple[Score, ...]
    version: int
    baselines: tuple[Score, ...] = ()

    @staticmethod
    def of(group: Group) -> StoredGroup:
        """Return the stored form of a group."""
        return StoredGroup(**{name: getattr(group, name) for name in StoredGroup.__struct_fields__})

    def group(self, rollouts: Sequence[Rollout], failed: Sequence[Rollout]) -> Group:
        """Return the decoded group."""
        return Group(rollouts=tuple(rollouts), failed=tuple(failed), **msgspec.structs.asdict(self))


def encode(value: Any) -> bytes:
    """Encode a data type of `sparring.types`, or plain data.

    Raises:
        TypeError: the value contains something that is not plain data.
    """
    try:
        return _encoder.encode(value)
    except OverflowError:  # so rare that the value is walked only then
        return _encoder.encode(
            _with_big_ints(msgspec.to_builtins(value, builtin_types=(bytes, bytearray), enc_hook=_plain))
        )


def decode(data: bytes, kind: type[T]) -> T:
    """Decode the output of `encode`.

    Raises:
        msgspec.MsgspecError: the bytes are not a `kind`.
    """
    value: T = _decoder(cast("Any", kind)).decode(data)
    return value


def refused_entries(data: bytes, error: msgspec.ValidationError) -> dict[str, Any]:
    """Return the entries that are no float of the table in which `decode` failed; `error` names the table but not the
    entry."""
    table = msgspec.msgpack.decode(data, ext_hook=_extension)
    for key in re.findall(r"\w+", str(error).partition("`$")[2]):
        table = table[int(key)] if isinstance(table, list) else table.get(key)
    return {key: value for key, value in table.items() if type(value) is not float} if isinstance(table, dict) else {}


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _making:
        return msgspec.msgpack.Decoder(kind, ext_hook=_extension)


def _extension(code: int, data: memoryview) -> int:
    if code != BIG_INT:
        raise msgspec.ValidationError(f"unknown extension {code}")
    return int(bytes(data).decode())


def _with_big_ints(value: Any) -> Any:
    """Return plain data with every integer beyond 64 bits as a MessagePack extension."""
    if isinstance(value, dict):
        return {k: _with_big_ints(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_big_ints(v) for v in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(BIG_INT, str(value).encode())
    return value
