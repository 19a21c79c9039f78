"""verl in a process of its own, asked line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "algo"))  # where policy_cases computes ours
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks verl: `verl("loss", name="vanilla", ...)`; see peer.py."""
    errors = tmp_path_factory.mktemp("verl") / "errors"
    words = [str(ROOT / ".venv-peers/bin/python"), str(Path(__file__).with_name("peer.py"))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with errors.open("w") as sink:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": sink}
        process = subprocess.Popen(words, env=environment, text=True, **pipes)

        def ask(what: str, **details: Any) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"ask": what, **details}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, errors.read_text()[-3000:]
            answer = json.loads(line)
            assert "error" not in answer, answer["error"]
            return answer

        yield ask
        process.communicate(timeout=60)
        assert process.returncode == 0, errors.read_text()[-3000:]
