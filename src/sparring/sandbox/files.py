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
    """Files of a box. No new command begins while its caller reads or writes one.

    Args:
        commands: commands of the box.
    """

    def __init__(self, commands: BoxCommands) -> None:
        self._commands = commands

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return a file of the box; relative paths start at the working folder. Only regular files are read, without
        waiting. No new command begins meanwhile.

        Args:
            path: path of the file.
            most_bytes: maximum size of the file.

        Raises:
            FileNotFoundError: there is no such file.
            SpoiltFile: the box is in the policy's hands, and at the path is nothing, something else (a pipe, a folder),
                a larger file, or one that cannot be read.
            OSError: error of open(2) in any other box.
            SandboxError: the box failed.
        """
        return await self._gather({"op": "read", "path": path}, most_bytes)

    async def read_plain(self, path: str, most_bytes: int) -> bytes:
        """Return a file as `read` does, but refuse links, also in its folders, and take every error for a command's
        doing."""
        return await self._gather({"op": "read", "path": path, "plain": True}, most_bytes)

    async def remove(self, path: str) -> None:
        """Remove a file, if it is there.

        Raises:
            Exception: as `write`.
        """
        await self._put({"op": "remove", "path": path})

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        """Return the kind of each entry of a folder, without following links. Names that are not UTF-8 are as in
        `os.listdir`.

        Raises:
            FileNotFoundError: there is no such folder.
            SpoiltFile: a command of this box left something else at the path, made it unreadable, or left more names
                than fit into `MOST_BYTES`.
            OSError: error of scandir(2) in a box where no command has run.
            SandboxError: the box failed.
        """
        body = await self._gather({"op": "list", "path": path}, MOST_BYTES)
        pairs = (entry.partition(b" ") for entry in body.split(b"\0")[:-1])
        return {os.fsdecode(name): cast(EntryKind, kind.decode()) for kind, _, name in pairs}

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the box and create its folders. The file appears once it is complete; until then, and after a
        failure, the old content stays.

        Raises:
            SpoiltFile: a command of this box prevents it: the path is not a file, a folder cannot be written, or the
                disk is full.
            OSError: error that no command can have caused: a read-only place, or no command has run.
            SandboxError: the box failed.
        """
        check_bytes("write", data)
        await self._put({"op": "write", "path": path, "size": len(data)}, data)

    async def upload(self, tree: Mapping[str, TreeEntry | bytes], path: str = ".") -> None:
        """Write a tree below a folder, which is made. A file that was there keeps its mode if the new one is not
        executable; each file appears whole.

        Raises:
            BadInput: a path that leads out of the tree.
            SpoiltFile: a command of this box is in the way.
            OSError: as for `write`.
            SandboxError: the box failed.
        """
        await self._put({"op": "unpack", "path": path}, packed(tree))

    async def download(self, path: str = ".", most_bytes: int = MOST_BYTES) -> Mapping[str, TreeEntry]:
        """Return the tree below a folder, by the paths in it; links are not followed. Of `/proc`, and of what is shown
        read-only in the tree, such as an agent program's files, only the folder's name is there.

        Raises:
            FileNotFoundError: there is no such folder.
            SpoiltFile: a command of this box left more than `most_bytes`, with names, or made something unreadable.
            OSError: error in a box where no command has run.
            SandboxError: the box failed.
        """
        return unpacked(await self._gather({"op": "pack", "path": path}, most_bytes))

    async def _put(self, request: dict[str, Any], data: bytes = b"") -> None:
        """Have a file operation done that writes."""
        check_text("path", request["path"])
        async with self._commands.turn:
            await self._commands.told({**request, **BOUNDS}, data)

    async def _gather(self, request: dict[str, Any], most_bytes: int) -> bytes:
        """Return what a file operation writes, at most `most_bytes`."""
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
        BadInput: a path that leads out of the tree.
        SpoiltFile: an entry that is no file, folder or link, which a command left where the tree was read.
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
    """Return the tree that a box wrote."""
    tree, at = {}, 0
    while at < len(data):
        end = data.index(b"\n", at)
        told = json.loads(data[at:end])
        at = end + 1 + told["size"]
        tree[told["path"]] = TreeEntry(
            kind=told["kind"], data=data[end + 1 : at], executable=told["executable"], target=told["target"]
        )
    return tree
