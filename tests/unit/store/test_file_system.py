"""Which file systems several machines see, by a list of mounts as the kernel writes it."""

from pathlib import Path

import pytest

from sparring.store.file_system import file_system_of

LINES = r"""
22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /home rw,relatime - nfs4 server:/home rw,vers=4.2,local_lock=none
31 22 0:31 / /home/me/local rw - tmpfs tmpfs rw
32 22 0:32 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw,flock
33 22 0:33 / /once rw - lustre 10.0.0.1@tcp:/once rw,localflock
34 22 0:34 / /with\040blank rw master:2 - fuse.juicefs juice rw
35 22 0:35 / /disk rw - fuseblk /dev/sdb1 rw
36 22 0:36 / /hidden rw - tmpfs tmpfs rw
37 22 0:37 / /hidden rw - nfs server:/x rw,nolock
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text(LINES.lstrip())
    return file


@pytest.mark.parametrize(
    ("path", "kind", "remote", "locks_here_alone"),
    [
        ("/var/runs", "ext4", False, False),
        ("/home/me/runs", "nfs4", True, False),
        ("/homes/me", "ext4", False, False),
        ("/home/me/local/runs", "tmpfs", False, False),
        ("/scratch/runs", "lustre", True, False),
        ("/once", "lustre", True, True),
        ("/with blank/runs", "fuse.juicefs", True, False),
        ("/disk/runs", "fuseblk", False, False),
        ("/hidden/runs", "nfs", True, True),
    ],
)
def test_the_mount_of_a_path(mounts: Path, path: str, kind: str, remote: bool, locks_here_alone: bool) -> None:
    found = file_system_of(Path(path), mounts)
    assert (found.kind, found.remote, found.locks_here_alone) == (kind, remote, locks_here_alone)


def test_a_link_is_where_it_leads(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "runs").symlink_to("/home/me")
    assert file_system_of(tmp_path / "runs/first", mounts).kind == "nfs4"


def test_the_real_mounts_know_shared_memory(tmp_path: Path) -> None:
    assert file_system_of(Path("/dev/shm/x")).kind == "tmpfs"
    assert file_system_of(Path("/"), tmp_path / "none").kind == ""
