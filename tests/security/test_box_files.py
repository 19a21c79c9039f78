"""Attacks on `read`, `write` and `entries`: they cost the run nothing, say nothing that is not so, and fail by name."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import pytest
from suite import short_of

from sparring.errors import SpoiltFile
from sparring.types import MOST_BYTES, BoxSpec

MB = 1 << 20
SPARSE = "import os; os.truncate(os.open('answer.txt', os.O_CREAT | os.O_RDWR), 500 << 20)"


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def test_a_sparse_file_is_refused_unread(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.python(SPARSE)
        before = peak_mb()
        with pytest.raises(SpoiltFile, match=f"more than {MOST_BYTES} bytes"):
            await box.read("answer.txt")
        assert peak_mb() - before < 4

    in_box(work, disk_bytes=512 * MB)


def test_a_large_file_that_is_asked_for_is_held_once(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.python("import os; os.truncate(os.open('a', os.O_CREAT | os.O_RDWR), 96 << 20)")
        before = peak_mb()
        assert len(await box.read("a", 100 * MB)) == 96 * MB
        assert peak_mb() - before < 96 * 1.5
        shown = await box.exec(["grep", "VmHWM", "/proc/1/status"])  # the box's own process
        assert "VmHWM" not in shown.stdout or int(shown.stdout.split()[1]) >> 10 < 64

    in_box(work, disk_bytes=100 * MB)


@pytest.mark.parametrize("size", [1, pytest.param(48 * MB, marks=pytest.mark.full)])
def test_a_tree_is_read_whatever_may_be_read_at_most(in_box: Any, size: int) -> None:
    """A file larger than the box's memory too: what cannot be read for another reason is never the policy's failure."""

    async def work(box: Any) -> int:
        await box.exec(["truncate", "-s", str(size), "a"])
        tree = await box.download(".", 1 << 40)
        return len(tree["a"].data)

    assert in_box(work, memory_bytes=32 * MB, disk_bytes=64 * MB) == size


@pytest.mark.full
def test_a_file_that_a_command_cuts_while_its_tree_is_read_leaves_the_others_whole(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.write("b", b"after")
        await box.start("while :; do truncate -s 3M a; truncate -s 0 a; done")
        for _ in range(100):
            tree = await box.download()
            assert tree["b"].data == b"after" and not any(tree["a"].data if "a" in tree else b"")

    in_box(work)


@pytest.mark.parametrize("size", short_of([0, 1, 4 * MB - 1, 4 * MB, 4 * MB + 1, 9 * MB], [0, 4 * MB + 1]))
def test_a_file_in_pieces_is_the_file(in_box: Any, size: int) -> None:
    data = (bytes(range(251)) * (size // 251 + 1))[:size]

    async def work(box: Any) -> tuple[bytes, bytes]:
        await box.write("a", data)
        return await box.read("a"), await box.read("a", size)

    assert in_box(work) == (data, data)


@pytest.mark.parametrize(
    ("code", "most_bytes"),
    [
        ("open('a', 'wb').write(bytes(101))", 100),
        ("open('a', 'wb').write(bytes(17 << 20))", MOST_BYTES),
        ("import os; os.symlink('/proc/self/maps', 'a')", 100),  # whose size the kernel tells as 0
        ("import os; os.symlink('/usr/bin/python3', 'a')", 1000),
    ],
)
def test_a_read_that_would_be_cut_is_told(in_box: Any, code: str, most_bytes: int) -> None:
    async def work(box: Any) -> None:
        assert (await box.python(code)).exit_code == 0
        with pytest.raises(SpoiltFile, match=f"more than {most_bytes} bytes"):
            await box.read("a", most_bytes)

    in_box(work, disk_bytes=32 * MB)


@pytest.mark.parametrize(
    "target", ["/proc/self/mem", "/usr/bin/new", "/nowhere/new", "/proc/self/attr/current", "/dev/zero", "b" * 4000]
)
@pytest.mark.parametrize("place", ["tests.py", "sub/tests.py"])
def test_a_link_to_where_nothing_can_be_written_is_the_policy_s(in_box: Any, target: str, place: str) -> None:
    async def work(box: Any) -> None:
        await box.python(f"import os; os.symlink({target!r}, {place.partition('/')[0]!r})")
        with pytest.raises(SpoiltFile):
            await box.write(place, b"tests")
        if target == "/proc/self/mem":
            with pytest.raises(SpoiltFile):
                await box.read(place)

    in_box(work)


def test_a_write_is_linear_and_leaves_no_part(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.write("data", b"before")
        await box.write("kept/x", bytes(50 * MB))  # quadratic, it took longer than a write may
        with pytest.raises(SpoiltFile, match="No space left"):
            await box.write("data", bytes(20 * MB))
        assert await box.read("data") == b"before"
        assert await box.entries() == {"data": "file", "kept": "folder"}
        assert await box.entries("kept") == {"x": "file"}

    async def used(box: Any) -> None:
        await box.python("1")
        await work(box)

    in_box(used, disk_bytes=64 * MB)


def test_a_write_that_is_killed_leaves_what_was_there(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.write("data", b"before")
        request = {"op": "write", "path": "data", "size": 9 * MB, "timeout": 20.0, "output": 0}
        with pytest.raises(OSError):
            await box.commands.told(request, bytes(8 * MB))  # less than was said arrives
        assert (await box.read("data"), await box.entries()) == (b"before", {"data": "file"})

    in_box(work)


def test_a_write_keeps_the_mode_and_goes_through_a_link(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.python("import os; open('run', 'w'); os.chmod('run', 0o755); os.symlink('run', 'link')")
        await box.write("link", b"#!/bin/sh\necho ran\n")
        assert (await box.exec(["./run"])).stdout == "ran\n"
        assert await box.entries() == {"run": "file", "link": "link"}

    in_box(work)


NAMES = [" a c f", "a\nb", "-rf", "*", "file a", "\x1b[2J", "a b ", "é"]


def test_a_listing_tells_every_name_as_it_is(in_box: Any) -> None:
    """Whatever it is called: a name is no list of names, and no kind."""

    async def work(box: Any) -> dict[str, str]:
        await box.python(f"for name in {NAMES!r}: open(name, 'w')")
        await box.python(
            "import os, socket; os.mkdir('file'); os.mkfifo('p'); os.symlink('p', 'l'); os.symlink('/usr', 'u')\n"
            "socket.socket(socket.AF_UNIX).bind('s'); open(b'\\xff', 'w')"
        )
        return dict(await box.entries())

    others = {"file": "folder", "p": "other", "s": "other", "l": "link", "u": "link", "\udcff": "file"}
    assert in_box(work) == dict.fromkeys(NAMES, "file") | others


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.rmdir('d'); open('d', 'w')",
        "import os; os.chmod('d', 0)",
        "import os; os.rmdir('d'); os.mkfifo('d')",
        "import os; os.rmdir('d'); os.symlink('d', 'd')",
    ],
)
def test_a_folder_that_was_spoilt_is_the_policy_s(in_box: Any, code: str) -> None:
    async def work(box: Any) -> None:
        await box.write("d/x", b"")
        await box.python("import os; os.unlink('d/x')\n" + code)
        with pytest.raises(SpoiltFile):
            await box.entries("d")

    in_box(work)


def test_folders_too_deep_to_open_by_name_are_read(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.exec("n=$(printf '%0200d' 0); for i in $(seq 30); do mkdir $n; cd $n; done")
        assert max(map(len, await box.download())) > 4096

    in_box(work)


@pytest.mark.slow
def test_more_names_than_are_read_are_refused(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.python(f"for n in range({MOST_BYTES // 250}): open(f'{{n:0>250}}', 'w').close()")
        with pytest.raises(SpoiltFile, match="more than"):
            await box.entries()

    in_box(work, disk_bytes=512 * MB)


HOSTILE = """
import os
for name in ("os", "sys", "json", "stat", "random", "encodings", "errno"):
    open(name + ".py", "w").write("open('/box/ran', 'w')\\nraise SystemExit(0)\\n")
for place in (".local/lib/python3.11/site-packages", "."):
    os.makedirs(place, exist_ok=True)
    for name in ("usercustomize", "sitecustomize"):
        open(f"{place}/{name}.py", "w").write("open('/box/ran', 'w')\\n")
open("answer.txt", "w").write("42")
"""


def test_no_code_of_the_box_has_a_part_in_what_the_host_reads(in_box: Any) -> None:
    async def work(box: Any) -> Any:
        await box.python(HOSTILE)
        names = await box.entries()
        return await box.read("answer.txt"), names["answer.txt"], "ran" in await box.entries()

    assert in_box(work) == (b"42", "file", False)


def test_a_python_that_the_world_starts_runs_nothing_of_home(in_box: Any) -> None:
    """What lies beside a script is still found by it: a world says -I, or runs no command where a program lived."""

    async def work(box: Any) -> list[str]:
        version = (
            await box.exec(["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        ).stdout.strip()
        code = f"folder, version = '/box/.local/lib/python{version}/site-packages', '{version}'"
        plant = "\nimport os\nos.makedirs(folder)\nfor name in ('usercustomize', 'sitecustomize', 'random'):\n"
        write = "    open(f'{folder}/{name}.py', 'w').write('print(1)')\n"
        pth = "open(f'{folder}/a.pth', 'w').write('import usercustomize')\nopen('random.py', 'w').write('print(2)')"
        await box.python(code + plant + write + pth)
        words = (["python3", "-c", "1"], ["python3", "-I", "-c", "import random"], ["python3", "-c", "import random"])
        return [(await box.exec(line)).stdout for line in words]

    assert in_box(work) == ["", "", "2\n"]


def test_a_file_api_of_a_box_in_which_nothing_ran_blames_its_caller(in_box: Any) -> None:
    async def work(box: Any) -> None:
        await box.write("a", bytes(200))
        for attempt in (box.read("a", 100), box.entries("a"), box.entries("none")):
            with pytest.raises(OSError) as raised:
                await attempt
            assert not isinstance(raised.value, SpoiltFile)

    in_box(work)


def test_a_command_is_not_let_in_between_two_pieces(in_box: Any) -> None:
    """Or a program could change a file while it is read."""

    async def work(box: Any) -> None:
        await box.write("a", b"x" * (12 * MB))
        change = "import os; os.truncate('a', 0); os.truncate('a', 12 << 20)"
        data, _ = await asyncio.gather(box.read("a"), box.python(change))
        assert data == b"x" * (12 * MB)

    in_box(work)


def test_the_smallest_disk_still_serves(in_box: Any) -> None:
    assert BoxSpec().disk_bytes >= MB

    async def work(box: Any) -> bytes:
        await box.write("a", b"1")
        return bytes(await box.read("a"))

    assert in_box(work, disk_bytes=MB) == b"1"
