"""Preflight check that this machine can start boxes, by starting one."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparring.errors import BadInput, SandboxError, refusal
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.make import make_boxes
from sparring.sandbox.mounts import box_identity, user_refusal
from sparring.types import BoxSpec

KERNEL_SWITCHES = (
    (
        "apparmor_restrict_unprivileged_userns",
        "1",
        "0",
        " or give the program an AppArmor profile with the rule 'userns,'",
    ),
    ("unprivileged_userns_clone", "0", "1", ""),
)


def check_sandbox(config: SandboxConfig | None = None) -> None:
    """Start a box, run a command in it, and refuse a machine where that fails. Do nothing if the sandbox is disabled.

    Raises:
        BadInput: bubblewrap or an interpreter for the boxes is missing, the machine forbids user namespaces, or the
            boxes of another kind fail; this process may open too few files; or something else runs as the boxes' user.
    """
    config = config or SandboxConfig()
    if not config.enabled:
        return
    is_ours = config.kind == "bubblewrap"
    if is_ours and shutil.which(config.bwrap) is None:
        expected = "bubblewrap (the program that isolates what the policy runs)"
        raise refusal("sandbox.bwrap", expected, f"no program {config.bwrap!r}", "do: apt-get install bubblewrap")
    if is_ours and config.python != "auto" and not Path(config.python).is_file():
        raise refusal(
            "sandbox.python", "an interpreter", f"no file {config.python!r}", "write 'auto' or a path that exists"
        )
    others = others_of(config.user, config.bwrap) if is_ours and box_identity(config.user) else set()
    if others:
        time.sleep(0.2)  # what another run had just begun is bubblewrap by now
        if others := others & others_of(config.user, config.bwrap):
            raise user_refusal(config.user, f"whom process {min(others)} runs as")
    with ThreadPoolExecutor(1) as thread:  # the caller may already run an event loop
        failure = thread.submit(asyncio.run, _probe(config)).result()
    if failure is not None and not is_ours:
        raise refusal("sandbox.kind", "boxes that run a command", repr(failure), f"see what {config.kind} lacks")
    if failure is not None:
        raise _explain(config, failure)


def others_of(user: int, bwrap: str) -> set[int]:
    """Return the processes that run as `user` outside of boxes, without bubblewrap's own processes."""
    programs, ours = {"bwrap", Path(shutil.which(bwrap) or bwrap).resolve().name}, os.readlink("/proc/self/ns/user")
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ids = (folder / "status").read_text().partition("\nUid:")[2].split()[:4]
            is_here = str(user) in ids and os.readlink(folder / "ns/user") == ours
            if is_here and os.path.basename(os.readlink(folder / "exe")) not in programs:
                found.add(int(folder.name))
        except OSError:
            pass  # it has ended
    return found


PROBE = """
import os, time
count = 0
try:
    while count < 8:
        if os.fork() == 0:
            time.sleep(3600)
        count += 1
except BlockingIOError:
    pass
print(6 * 7, count)
"""


async def _probe(config: SandboxConfig) -> str | None:
    """Start a box and a command in it. Return the failure as text, or None."""
    boxes = make_boxes(config)
    try:
        box = await boxes.take(BoxSpec(timeout_s=20.0, processes=4))
        result = await box.python(PROBE)
        await box.close()
    except SandboxError as error:
        return str(error)
    finally:
        await boxes.close()
    if result.stdout == "42 8\n":
        return "no limit on processes"
    return None if result.stdout == "42 3\n" else f"a wrong answer: {result.stdout!r} {result.stderr!r}"


def _explain(config: SandboxConfig, failure: str) -> BadInput:
    if any(words in failure for words in ("source path", "execvp", "failed to execute")):
        expected = "an interpreter that any user of this machine can read"
        return refusal(
            "sandbox.python", expected, repr(failure), "do: apt-get install python3, or write the path of one"
        )
    expected = "a machine where bubblewrap may make user namespaces"
    for name, forbids, allows, otherwise in KERNEL_SWITCHES:
        switch = Path("/proc/sys/kernel") / name
        if switch.exists() and switch.read_text().strip() == forbids:
            return refusal("sandbox", expected, repr(failure), f"do: sysctl -w kernel.{name}={allows}{otherwise}")
    if failure == "no limit on processes":
        expected = "a user whose processes the kernel counts"
        return refusal("sandbox", expected, failure, "run as a normal user, or as root of the machine")
    words = ("namespace", "uid map", "ermission", "not permitted")
    if any(word in failure for word in words):
        way = (
            f"do: allow them to {config.bwrap!r} (sysctl kernel.apparmor_restrict_unprivileged_userns=0 or an "
            "AppArmor profile with the rule 'userns,'; sysctl user.max_user_namespaces above 0; in a container, its "
            "seccomp profile)"
        )
        return refusal("sandbox", expected, repr(failure), way)
    return refusal(
        "sandbox", "a box that runs a command", repr(failure), f"run {config.bwrap!r} by hand to see what it lacks"
    )
