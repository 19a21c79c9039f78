"""How `make test` ends when a test hangs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES, TESTS = 9, 6


@pytest.mark.full
def test_a_test_that_hangs_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """It hangs when its worker has finished other files."""
    show = ("make", "--silent", "--eval", "show: ; @echo '$(HANGS)'", "show")
    options = shlex.split(subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert options
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for file in range(FILES):
        tests = [f"def test_{number}():\n    pass\n" for number in range(TESTS)]
        if file == FILES - 3:
            tests[0] = "import threading\ndef test_hangs():\n    threading.Event().wait()\n"
        (tmp_path / f"test_file_{file}.py").write_text("".join(tests))
    command = (sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    ended = subprocess.run(
        (*command, *options, "-o", "faulthandler_timeout=1"), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert f"crashed while running 'test_file_{FILES - 3}.py::test_hangs'" in ended.stdout
    assert "in wait" in ended.stderr
