"""A folder of runs on a file system that several machines see: what the user is told, and what is refused."""

from pathlib import Path

import pytest
from refusals import refused_at

from sparring.errors import BadInput
from sparring.stages.preflight.directory import check_directory


def mounts_of(folder: Path, kind: str, options: str) -> Path:
    """Mounts in which `folder` is on a file system of a kind with options."""
    file = folder / "mountinfo"
    file.write_text(f"22 1 0:20 / / rw - ext4 /dev/sda1 rw\n30 22 0:30 / {folder} rw - {kind} server:/x {options}\n")
    return file


def test_the_limit_of_a_file_system_of_several_machines_is_told(tmp_path: Path) -> None:
    assert check_directory(tmp_path / "runs", mounts_of(tmp_path, "ext4", "rw")) == []
    [fact] = check_directory(tmp_path / "runs", mounts_of(tmp_path, "nfs4", "rw,local_lock=none"))
    assert f"{tmp_path / 'runs'} is on nfs4" in fact and "after the run has ended" in fact


def test_a_folder_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    with refused_at("run.directory", "one that takes no folder (No such file or directory)"):
        check_directory(Path("/proc/x"))  # root may write there by its mode
    (tmp_path / "file").touch()
    with refused_at("run.directory", "got a file"):
        check_directory(tmp_path / "file/runs")
    check_directory(tmp_path / "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("kind", "option"), [("nfs", "nolock"), ("nfs4", "local_lock=flock"), ("lustre", "localflock")]
)
def test_locks_that_another_machine_does_not_see_are_refused(tmp_path: Path, kind: str, option: str) -> None:
    with pytest.raises(BadInput, match=f"got {kind} with {option}") as refused:
        check_directory(tmp_path / "runs", mounts_of(tmp_path, kind, f"rw,{option}"))
    assert refused.value.where == "run.directory"
