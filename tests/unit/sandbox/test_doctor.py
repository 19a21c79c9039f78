"""The doctor says what this machine enforces, as root and as an ordinary user."""

from __future__ import annotations

import pytest

from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.doctor import examine
from sparring.sandbox.groups import hierarchy_of_this_process
from sparring.sandbox.verbs import main


def test_the_doctor_prints_a_row_for_each_promise(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line.startswith(("yes", "NO "))]
    assert status == any(row.startswith("NO ") for row in rows)
    assert [row.split("  ")[1].strip() for row in rows][:4] == [
        "boxes",
        "calls into the kernel",
        "memory",
        "shares of the processors",
    ]
    assert {"memory in no group", "watches on files of /usr", "user of the boxes"} <= {
        row.split("  ")[1].strip() for row in rows
    }
    memory = next(row for row in rows if " memory " in row)
    assert memory.startswith("yes") == (hierarchy_of_this_process() is not None)


def test_each_missing_part_has_a_cost() -> None:
    for finding in examine():
        assert finding.holds == (finding.cost == "")


def test_a_machine_without_bubblewrap_has_no_boxes() -> None:
    (finding,) = examine(SandboxConfig(bwrap="no-such-program"))
    assert not finding.holds
    assert "apt-get install bubblewrap" in finding.cost
