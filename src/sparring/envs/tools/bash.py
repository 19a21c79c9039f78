"""The `bash` tool: one shell in the task's box for all calls."""

from __future__ import annotations

from sparring.envs.base import tool
from sparring.envs.executor import cooperative
from sparring.protocols import Sandbox, Shell
from sparring.types import BoxSpec, ExecResult, Task


class BashTool:
    """Mixin that gives an `Env` the tool: `class MyWorld(BashTool, Env)`. Time and output of a call are limited by the
    task's box."""

    needs_box = True
    box: Sandbox | None
    task: Task
    _shell: Shell | None = None

    @tool
    @cooperative
    async def bash(self, command: str) -> str:
        """Run a command in a shell, which keeps its folder, variables and background jobs."""
        assert self.box is not None, "a world with needs_box is opened with a box"
        if self._shell is None or self._shell.ended:
            if self._shell is not None:
                await self._shell.close()  # else it keeps its place among the commands of the box
            self._shell = await self.box.shell()
        result = await self._shell.run(command)
        text = shell_text(result, limit_s=(self.task.box or BoxSpec()).timeout_s)
        return f"{text}\nthe shell has ended; the next command starts another" if self._shell.ended else text


def shell_text(result: ExecResult, *, limit_s: float) -> str:
    """Return a command's result as text for the model: its output, and how it ended if it failed. `limit_s` is the
    wall-clock limit that the text names."""
    lines = [text.rstrip() for text in (result.stdout, result.stderr) if text.strip()]
    if result.end == "timed out":
        lines.append(f"timed out after {limit_s:g} s")
    elif result.end not in ("exited", "signalled"):
        lines.append(result.end)
    elif result.exit_code:
        lines.append(f"exit code {result.exit_code}")
    return "\n".join(lines) or "no output"
