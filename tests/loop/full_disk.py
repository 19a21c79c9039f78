"""Run by test_refusals in a mount namespace of its own: fills a small disk under a run, frees it, and runs the command
again.

    python full_disk.py DISK COMMAND...

Prints one JSON object: `code` and `said` (stderr) of the run whose disk is full, `at` (the step that it was told at),
`again` (the exit code of the second run) and `weights` (their SHA-256).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path


def fill(ballast: Path) -> None:
    """Write until not a byte more fits."""
    handle = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 20, 1 << 12, 1):
        try:
            while os.write(handle, b"\0" * size):
                pass
        except OSError:
            continue
    os.close(handle)


disk, command = Path(sys.argv[1]), sys.argv[2:]
at = ""
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
    assert run.stdout is not None and run.stderr is not None
    for line in run.stdout:
        if line.startswith("rl ") and not at:
            at = line.split()[1]
            fill(disk / "ballast")
    said = run.stderr.read()
(disk / "ballast").unlink()
again = subprocess.run(command, stdout=subprocess.DEVNULL)
digest = hashlib.sha256((disk / "tiny/rl/model/model.safetensors").read_bytes()).hexdigest()
print(json.dumps({"code": run.returncode, "said": said, "at": at, "again": again.returncode, "weights": digest}))
