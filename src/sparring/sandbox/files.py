"""Files of a box, read and written for its caller."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, cast

from sparring.errors import SpoiltFile, refusal
from sparring.sandbox.commands import BoxCommands
from sparring.sandbox.connection import Call
from sparring.sandbox.requests import check_bytes, check_text
from sparring.types import MOST_BYTES, EntryKind, TreeEntry
from sparring.types.boxes import check_count

FILE_TIMEOUT_S = 10.0  # these run for the caller and not for the policy
BOUNDS = {"timeout": FILE_TIMEOUT_S, "output": 0}


class FileAccess:
    """Files of a box. No new command begins while its caller reads or writes one. Implements `Sandbox` for files."""

    def __init__(self, commands: BoxCommands) -> None:
        self._commands = commands

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        return await self._gather({"op": "read", "path": path}, most_bytes)

    async def read_plain(self, path: str, most_bytes: int) -> bytes:
        """Return a file as `read` does, but refuse links, also in the path's folders. Errors are the policy's failures,
        except for those in `fault.MACHINES`."""
        return await self._gather({"op": "read", "path": path, "plain": True}, most_bytes)

    async def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        await self._put({"op": "remove", "path": path})

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        body = await self._gather({"op": "list", "path": path}, MOST_BYTES)
        pairs = (entry.partition(b" ") for entry in body.split(b"\0")[:-1])
        return {os.fsdecode(name): cast(EntryKind, kind.decode()) for kind, _, name in pairs}

    async def write(self, path: str, data: bytes) -> None:
        check_bytes("write", data)
        await self._put({"op": "write", "path": path, "size": len(data)}, data)

    async def upload(self, tree: Mapping[str, TreeEntry | bytes], path: str = ".") -> None:
        await self._put({"op": "unpack", "path": path}, packed(tree))

    async def download(self, path: str = ".", most_bytes: int = MOST_BYTES) -> Mapping[str, TreeEntry]:
        return unpacked(await self._gather({"op": "pack", "path": path}, most_bytes))

    async def _put(self, request: dict[str, Any], data: bytes = b"") -> None:
        """Run a file operation that writes, and wait for its end."""
        check_text("path", request["path"])
        async with self._commands.turn:
            await self._commands.told({**request, **BOUNDS}, data)

    async def _gather(self, request: dict[str, Any], most_bytes: int) -> bytes:
        """Run a file operation that reads, and return its output, at most `most_bytes`."""
        check_text("path", request["path"])
        check_count("most_bytes", most_bytes)
        data = io.BytesIO()

        def sink(call: Call, _: str, piece: bytes) -> None:
            data.write(piece)
            connection.tell(call, "credit", bytes=len(piece))

        async with self._commands.turn:
            connection = await self._commands.open()
            await self._commands.told({**request, **BOUNDS, "most": most_bytes}, sink=sink)
        return data.getvalue()


def packed(tree: Mapping[str, TreeEntry | bytes]) -> bytes:
    """Return a tree as one string of bytes.

    Raises:
        BadInput: a path leads out of the tree, or the tree is not a mapping of paths to content.
        SpoiltFile: the tree has a pipe, a socket or a device, which only a tree read from a box has.
    """
    parts = []
    if not isinstance(tree, Mapping):
        raise refusal("upload", "a mapping of paths", f"a {type(tree).__name__}", "write {path: bytes}")
    for path, given in tree.items():
        entry = given if isinstance(given, TreeEntry) else TreeEntry(data=given)
        check_text("upload", path)
        check_bytes(f"upload: {path!r}", entry.data)
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
            raise refusal("upload", "paths within the tree", repr(path), "leave out what leads elsewhere")
        if entry.kind == "other":  # only a box's tree has one
            raise SpoiltFile(errno.ENXIO, "a pipe, a socket or a device cannot be carried", path)
        told = {"path": path, "kind": entry.kind, "size": len(entry.data), "executable": entry.executable}
        parts += [json.dumps({**told, "target": entry.target}).encode() + b"\n", entry.data]
    return b"".join(parts)


def unpacked(data: bytes) -> dict[str, TreeEntry]:
    """Parse the bytes of a tree that a box sent."""
    tree, at = {}, 0
    while at < len(data):
        end = data.index(b"\n", at)
        told = json.loads(data[at:end])
        at = end + 1 + told["size"]
        tree[told["path"]] = TreeEntry(
            kind=told["kind"], data=data[end + 1 : at], executable=told["executable"], target=told["target"]
        )
    return tree
