"""The terminal's tools: keys and the screen of a shell in the task's box, for programs that draw."""

from __future__ import annotations

from sparring.envs.base import ToolError, tool
from sparring.envs.executor import cooperative
from sparring.protocols import Sandbox, Terminal
from sparring.types import BoxSpec, Task

KEYS = (
    {
        "Enter": "\r",
        "Tab": "\t",
        "Escape": "\x1b",
        "Backspace": "\x7f",
        "Up": "\x1b[A",
        "Down": "\x1b[B",
        "Right": "\x1b[C",
        "Left": "\x1b[D",
        "Space": " ",
    }
    | {f"C-{chr(96 + code)}": chr(code) for code in range(1, 27)}
    | {"C-\\": "\x1c"}
)
INTERRUPTING = ("C-c", "C-z", "C-\\")  # after which the terminal forgets what was typed with it
MOST_KEYS = 4096
"""Maximum number of characters in one call."""
QUIET_S = 0.3


class TerminalTool:
    """Mixin that gives an `Env` the tool: `class MyWorld(TerminalTool, Env)`. It needs `sparring[terminal]`.
    The screen is `columns` wide and `rows` high, in characters."""

    needs_box = True
    columns: int = 80
    rows: int = 24
    box: Sandbox | None
    task: Task
    _terminal: Terminal | None = None

    @tool
    @cooperative
    async def type(self, keys: list[str]) -> str:
        """Type on a terminal in which a shell runs, and see its screen once it stands still.

        Args:
            keys: Texts, and names of keys as Enter, Tab, Escape, Up, C-c.
        """
        assert self.box is not None, "a world with needs_box is opened with a box"
        if sum(map(len, keys)) > MOST_KEYS:
            raise ToolError(f"more than {MOST_KEYS} characters")
        if self._terminal is None or self._terminal.ended:
            if self._terminal is not None:
                await self._terminal.close()  # else it keeps its place among the commands of the box
            self._terminal = await self.box.terminal(["/bin/sh", "-i"], columns=self.columns, rows=self.rows)
        limit_s = (self.task.box or BoxSpec()).timeout_s
        for key in keys:
            await self._terminal.type(KEYS.get(key, key))
            if key in INTERRUPTING:
                await self._terminal.quiet(QUIET_S, limit_s)
        await self._terminal.quiet(QUIET_S, limit_s)
        screen = self._terminal.screen() or "an empty screen"
        return f"{screen}\nthe shell has ended; the next keys start another" if self._terminal.ended else screen
