"""Trees of files as they travel to and from a box; `inner.files` has the form."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from sparring.errors import SpoiltFile, refusal
from sparring.sandbox.requests import check_bytes, check_text
from sparring.types import TreeEntry


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
