"""The `python` tool: runs the model's code in the task's box."""

from __future__ import annotations

from sparring.envs.base import tool
from sparring.envs.executor import cooperative
from sparring.protocols import Sandbox
from sparring.types import BoxSpec, ExecResult, Task


class PythonTool:
    """Mixin that gives an `Env` the tool: `class MyWorld(PythonTool, Env)`."""

    needs_box = True
    box: Sandbox | None
    task: Task

    @tool
    @cooperative
    async def python(self, code: str) -> str:
        """Run Python code."""
        assert self.box is not None, "a world with needs_box is opened with a box"
        spec = self.task.box or BoxSpec()
        return output_text(await self.box.python(code), limit_s=spec.timeout_s)


def output_text(result: ExecResult, *, limit_s: float | None = None) -> str:
    """Return a command's result as text for the model: its output, or a line with the reason for having none.

    A tiny model has to read every token of this text, so a traceback is cut to its last line. Limits are the policy's
    own doing, and reported rather than raised; `limit_s` is the wall-clock limit that the text names.
    """
    lines = [result.stdout.strip()] if result.stdout.strip() else []
    if result.truncated:
        lines.append("output truncated")
    if result.timed_out:
        lines.append("timed out" if limit_s is None else f"timed out after {limit_s:g} s")
    elif result.out_of_memory:
        lines.append("out of memory")
    elif result.exit_code != 0:
        errors = result.stderr.strip().splitlines()
        lines.append(errors[-1].strip() if errors else f"exit code {result.exit_code}")
    return "\n".join(lines) if lines else "no output"
