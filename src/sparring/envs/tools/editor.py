"""The editor's tools: see, create and change text files of the task's box, without running anything in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparring.envs.base import ToolError, tool
from sparring.envs.executor import cooperative
from sparring.protocols import Sandbox

MOST_FILE_BYTES = 1 << 20
MOST_LINES = 200
"""Maximum number of lines that one `view` shows."""


class EditorTool:
    """Mixin that gives an `Env` the tools: `class MyWorld(EditorTool, Env)`. A file holds 1 MiB of UTF-8 at most."""

    needs_box = True
    box: Sandbox | None

    @tool
    @cooperative
    async def view(self, path: str, first_line: int = 1) -> str:
        """Show up to 200 lines of a file with their numbers, or the names in a folder.

        Args:
            path: File or folder.
            first_line: First line to show.
        """
        if await _is_folder(self.box, path):
            with _told(path):
                return "\n".join(sorted(await _box(self.box).entries(path))) or "an empty folder"
        lines = (await self._text(path)).split("\n")
        if not 1 <= first_line <= len(lines):
            raise ToolError(f"{path} has lines 1 to {len(lines)}, not {first_line}")
        window = lines[first_line - 1 : first_line - 1 + MOST_LINES]
        rest = len(lines) - (first_line - 1 + len(window))
        numbered = [f"{number}\t{line}" for number, line in enumerate(window, first_line)]
        return "\n".join([*numbered, *([f"{rest} more lines"] if rest else [])])

    @tool
    @cooperative
    async def create(self, path: str, text: str) -> str:
        """Write a file with this text; what was there is replaced."""
        return await self._put(path, text)

    @tool
    @cooperative
    async def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        text = await self._text(path)
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolError(f"the old text occurs {count} times in {path}; give one that occurs once")
        return await self._put(path, text.replace(old, new))

    @tool
    @cooperative
    async def insert(self, path: str, after_line: int, text: str) -> str:
        """Insert lines into a file.

        Args:
            path: File.
            after_line: Line to insert after; 0 for the beginning.
            text: Lines to insert.
        """
        lines = (await self._text(path)).split("\n")
        if not 0 <= after_line <= len(lines):
            raise ToolError(f"{path} has lines 1 to {len(lines)}, not {after_line}")
        return await self._put(path, "\n".join([*lines[:after_line], text.removesuffix("\n"), *lines[after_line:]]))

    async def _text(self, path: str) -> str:
        with _told(path):
            data = await _box(self.box).read(path, MOST_FILE_BYTES)
            try:
                return data.decode()
            except UnicodeDecodeError:
                raise ToolError(f"{path}: not UTF-8 text") from None

    async def _put(self, path: str, text: str) -> str:
        data = text.encode("utf-8", "replace")
        if len(data) > MOST_FILE_BYTES:
            raise ToolError(f"{path}: more than {MOST_FILE_BYTES} bytes")
        with _told(path):
            await _box(self.box).write(path, data)
        return f"wrote {len(data)} bytes"


def _box(box: Sandbox | None) -> Sandbox:
    assert box is not None, "a world with needs_box is opened with a box"
    return box


async def _is_folder(box: Sandbox | None, path: str) -> bool:
    try:
        await _box(box).entries(path)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Context that shows errors of the file system to the model."""
    if not path or "\0" in path:
        raise ToolError("a path has a name, and no NUL")
    try:
        yield
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror or error}") from error
