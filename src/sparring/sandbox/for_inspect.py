"""Boxes for tasks of inspect_ai: `import sparring.sandbox.for_inspect`, then `sandbox="sparring"` in a task.

Needs the package inspect_ai, which nothing else of Sparring imports.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)

from sparring.protocols import Boxes, Sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.make import make_boxes
from sparring.types import BoxSpec

SPEC = BoxSpec(timeout_s=3600.0, memory_bytes=2 << 30, disk_bytes=1 << 30, processes=512)
"""Spec of a sample's box."""
_pools: dict[str, Boxes] = {}


@sandboxenv(name="sparring")
class InspectBox(SandboxEnvironment):  # type: ignore[misc]  # the package is not there where types are checked
    """Box of one sample.

    Args:
        box: the box, which `sample_cleanup` closes.
    """

    def __init__(self, box: Sandbox) -> None:
        super().__init__()
        self._box = box

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command as the box's only user.

        Raises:
            SandboxUserUnsupportedError: another user is asked for.
            TimeoutError: the command took longer than `timeout` seconds.
            PermissionError: the program may not be run.
        """
        if user is not None:
            raise SandboxUserUnsupportedError(f"a box of sparring has one user; it cannot run a command as {user!r}")
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        stdin = b"" if input is None else input
        result = await self._box.exec(cmd, stdin=stdin, cwd=cwd, environment=env, timeout_s=timeout, output_bytes=most)
        if result.timed_out:
            raise TimeoutError(f"{cmd[0]} took longer than {timeout} s")
        if result.exit_code == 126 and result.stderr == f"{cmd[0]}: {os.strerror(errno.EACCES)}\n":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cmd[0])
        return ExecResult(result.exit_code == 0, result.exit_code, result.stdout, result.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file."""
        await self._box.write(file, contents.encode() if isinstance(contents, str) else contents)

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Read a file.

        Raises:
            OutputLimitExceededError: the file is larger than the package's limit.
        """
        most = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self._box.read(file, most)
        except OSError as error:
            if error.errno == errno.EFBIG:
                limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
                raise OutputLimitExceededError(limit, None) from error
            raise
        return data.decode() if text else data

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        """Make the task's pool."""
        _pools[task_name] = make_boxes(SandboxConfig(), {})

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Take a box."""
        return {"default": cls(await _pools[task_name].take(SPEC))}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        """Close the boxes of a sample."""
        for environment in environments.values():
            await environment.as_type(cls)._box.close()

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        """Close the task's pool."""
        if pool := _pools.pop(task_name, None):
            await pool.close()
