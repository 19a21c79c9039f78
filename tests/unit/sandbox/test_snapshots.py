"""Snapshots, forks and verifiers of real boxes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest

from sparring.errors import BadInput, SandboxError, SpoiltFile
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.snapshots import MOST_LAYERS
from sparring.types import BoxSpec

SPEC = BoxSpec(timeout_s=20.0, disk_bytes=64 << 20)


@pytest.mark.parametrize(
    ("image", "depth"),
    [("python", 2), ("host", 2), *(pytest.param(i, 5, marks=pytest.mark.full) for i in ("python", "host"))],
)
def test_every_path_of_a_tree_of_forks_has_its_own_files(bench: Any, image: str, depth: int) -> None:
    async def grow(box: Any, path: str, depth: int) -> int:
        """Fork a box twice, write on each side what tells them apart, and read everything again at the leaves."""
        if not depth:
            names = [path[: length + 1] for length in range(len(path))]
            files = {name: (await box.read(f"tree/{name}")).decode() for name in names}
            assert files == {name: name for name in names}
            assert set(await box.entries("tree")) == set(names), path
            assert (await box.read("gone" + path[-1])) == b"kept"
            return 1
        kept, leaves = await box.snapshot(), 0
        for branch in "ab":
            name = path + branch
            fork = await box.fork(kept)
            await fork.write(f"tree/{name}", name.encode())
            other = {"a": "b", "b": "a"}[branch]
            await fork.exec(["rm", "-f", f"gone{other}", f"tree/{path}{other}"])
            await fork.write(f"gone{branch}", b"kept")
            leaves += await grow(fork, name, depth - 1)
            await fork.close()
        return leaves

    async def work(box: Any) -> int:
        await box.write("gonea", b"kept")
        await box.write("goneb", b"kept")
        leaves = await grow(box, "", depth)
        return leaves

    assert bench.box(work, replace(SPEC, image=image)) == 2**depth


def test_a_box_goes_on_after_its_snapshot_and_neither_sees_the_other(bench: Any) -> None:
    async def work(box: Any) -> list[str]:
        await box.exec(
            [
                "sh",
                "-c",
                "mkdir folder; echo one > folder/file; echo t > /tmp/t; echo s > /dev/shm/s; ln -s file folder/link",
            ]
        )
        kept = await box.snapshot()
        await box.exec(["sh", "-c", "rm -r folder; mkdir folder; echo two > folder/new"])
        fork = await box.fork(kept)
        await fork.exec(["sh", "-c", "echo more >> folder/file"])
        show = ["sh", "-c", "cd folder; for name in *; do echo $name; cat $name; done; cat /tmp/t /dev/shm/s"]
        texts = [(await one.exec(show)).stdout for one in (box, fork, await box.fork(kept))]
        return texts

    assert bench.box(work, SPEC) == [
        "new\ntwo\nt\ns\n",
        "file\none\nmore\nlink\none\nmore\nt\ns\n",
        "file\none\nlink\none\nt\ns\n",
    ]


def test_a_retry_starts_from_the_last_snapshot_of_a_box_that_is_gone(bench: Any) -> None:
    async def work(box: Any) -> list[bytes]:
        await box.write("turn", b"1")
        await box.snapshot()
        await box.write("turn", b"2")
        last = await box.snapshot()
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.snapshot()
        retries = [await box.fork(last) for _ in range(3)]
        return list(await asyncio.gather(*(retry.read("turn") for retry in retries)))

    assert bench.box(work, SPEC) == [b"2"] * 3


def test_many_forks_of_one_snapshot_start_at_once(bench: Any) -> None:
    async def work(box: Any) -> set[str]:
        await box.write("file", b"same")
        kept = await box.snapshot()
        forks = [await box.fork(kept) for _ in range(24)]
        results = await asyncio.gather(*(fork.exec(["cat", "file"]) for fork in forks))
        await asyncio.gather(*(fork.close() for fork in forks))
        return {result.stdout for result in results}

    assert bench.box(work, SPEC) == {"same"}


def test_working_folder_and_environment_are_kept(bench: Any) -> None:
    async def work(box: Any) -> list[str]:
        await box.exec(["mkdir", "-p", "work/deep"])
        kept = replace(await box.snapshot(), folder="/box/work/deep", environment={"PATH": "/bin", "NAME": "value"})
        fork = await box.fork(kept)
        again = await fork.fork(await fork.snapshot())
        gone = await box.fork(kept)
        await gone.exec(["rm", "-r", "/box/work"])
        return [(await one.exec(["sh", "-c", "pwd; echo $NAME"])).stdout for one in (box, fork, again, gone)]

    assert bench.box(work, SPEC) == ["/box\n\n", *["/box/work/deep\nvalue\n"] * 2, "/box\nvalue\n"]


def test_snapshots_leave_no_descriptor_behind(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> tuple[int, int]:
        async def once() -> int:
            box = await boxes.take(SPEC)
            await box.write("file", b"x")
            forks = [await box.fork(await box.snapshot()) for _ in range(4)]
            await asyncio.gather(*(fork.read("file") for fork in forks))
            for one in (box, *forks):
                await one.close()
            del box, forks, one
            return len(os.listdir("/proc/self/fd"))

        return await once(), await once()

    before, after = bench.run(work)
    assert before == after


def test_snapshots_that_cannot_be_are_refused_by_name(bench: Any) -> None:
    async def work(box: Any) -> None:
        with pytest.raises(BadInput, match="expected a snapshot of a box of this pool, got a str"):
            await box.fork("yesterday")
        kept = await box.snapshot()
        box.commands.line.layers = kept.layers * MOST_LAYERS
        with pytest.raises(BadInput, match="at most 200 snapshots on top of each other"):
            await box.snapshot()

    bench.box(work, SPEC)


@pytest.mark.full
def test_two_hundred_snapshots_lie_on_top_of_each_other(bench: Any) -> None:
    async def work(box: Any) -> bytes:
        for number in range(MOST_LAYERS):
            await box.write(f"file{number}", b"%d" % number)
            kept = await box.snapshot()
        fork = await box.fork(kept)
        return b" ".join([await fork.read(f"file{number}") for number in (0, 99, MOST_LAYERS - 1)])

    assert bench.box(work, replace(SPEC, image="host")) == b"0 99 199"


FORBIDDEN = {
    "a link": ("ln -s /etc/passwd answer.txt", "answer.txt"),
    "a link that leads to a file of its own": ("echo x > y; ln -s y answer.txt", "answer.txt"),
    "a folder that is a link": ("mkdir real; echo x > real/answer.txt; ln -s real folder", "folder/answer.txt"),
    "a FIFO": ("mkfifo answer.txt", "answer.txt"),
    "a socket": ("python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"answer.txt\")'", "answer.txt"),
    "a folder": ("mkdir answer.txt", "answer.txt"),
    "a file in place of a folder": ("echo x > folder", "folder/answer.txt"),
    "10 GB": ("truncate -s 10G answer.txt || truncate -s 60M answer.txt", "answer.txt"),
    "a file that cannot be read": ("echo x > answer.txt; chmod 0 answer.txt", "answer.txt"),
    "a device": ("true", "/dev/zero"),
    "a file of the kernel's": ("true", "/proc/self/environ/x"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_but_plain_files_reaches_a_verifier(bench: Any, what: str) -> None:
    command, path = FORBIDDEN[what]

    async def work(box: Any) -> None:
        await box.snapshot()
        assert (await box.exec(["sh", "-c", command])).exit_code == 0
        with pytest.raises(SpoiltFile):
            await box.verifier([path])

    bench.box(work, SPEC)


@pytest.mark.parametrize("paths", ("answer.txt", [""], ["a/"], ["../x"], ["/box/./x"], ["a\0b"], [7]))
def test_a_path_that_names_no_file_is_refused(bench: Any, paths: Any) -> None:
    async def work(box: Any) -> None:
        with pytest.raises(BadInput, match="verifier"):
            await box.verifier(paths)

    bench.box(work, SPEC)


def test_a_verifier_has_what_was_prepared_and_the_named_files(bench: Any) -> None:
    async def work(box: Any) -> list[Any]:
        await box.write("prepared.txt", b"prepared")
        await box.write("removed.txt", b"prepared")
        await box.snapshot()
        await box.exec(
            [
                "sh",
                "-c",
                "echo forged > prepared.txt; echo mine > answer.txt; rm removed.txt; echo x > other; touch /tmp/x",
            ]
        )
        names = (f"{name}.txt" for name in ("answer", "missing", "removed"))  # one by one
        verifier = await box.verifier(names, most_bytes=100)
        found = [dict(await verifier.entries()), await verifier.read("prepared.txt"), await verifier.read("answer.txt")]
        return [*found, dict(await verifier.entries("/tmp"))]

    found = bench.box(work, SPEC)
    assert found == [{"answer.txt": "file", "prepared.txt": "file"}, b"prepared", b"mine\n", {}]


def test_a_fork_keeps_the_prepared_state_of_its_line(bench: Any) -> None:
    async def work(box: Any) -> Any:
        await box.snapshot()
        await box.exec(["touch", "usercustomize.py", "answer.txt"])
        retry = await box.fork(await box.snapshot())
        return dict(await (await retry.verifier(["answer.txt"])).entries())

    assert bench.box(work, SPEC) == {"answer.txt": "file"}


def test_a_verifier_without_a_prepared_state_is_refused_once_commands_have_run(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        box = await boxes.take(SPEC)
        await box.write("answer.txt", b"x")
        verifier = await box.verifier(["answer.txt"])  # nothing has run
        assert set(await verifier.entries()) == {"answer.txt"}
        other = await boxes.take(SPEC)
        await other.exec(["true"])
        with pytest.raises(BadInput, match=r"do: await box.snapshot\(\) at the end of Env.open"):
            await other.verifier(["answer.txt"])

    bench.run(work)


def test_a_judge_runs_without_the_files_that_it_asks_about(bench: Any) -> None:
    asks = "import os\nos.write(201, b'?')\nprint(os.read(200, 100).decode(), sorted(os.listdir()))"
    answers = "import os\nfrom answer import word\nos.read(200, 1)\nos.write(201, word.encode())"

    async def work(box: Any) -> list[str]:
        await box.write("tests.py", b"prepared")
        await box.snapshot()
        await box.exec(["sh", "-c", "echo 'word = \"sesame\"' > answer.py; echo 'raise OSError' > random.py"])
        verifier = await box.verifier(["answer.py"])
        said = [(await verifier.converse(asks, answers)).stdout for _ in range(2)]
        await verifier.write("answer.py", b"word = 'other'")
        return [*said, (await verifier.converse(asks, answers)).stdout]

    assert bench.box(work, SPEC) == ["sesame ['tests.py']\n"] * 2 + ["other ['tests.py']\n"]


@pytest.mark.full
def test_a_verifier_judges_as_often_as_it_is_asked(bench: Any) -> None:
    """What has not changed needs no further layer, of which a box has at most 200."""

    async def work(box: Any) -> set[str]:
        await box.snapshot()
        verifier = await box.verifier([])
        return {(await verifier.converse("print(1)", "")).stdout for _ in range(210)}

    assert bench.box(work, SPEC) == {"1\n"}


@pytest.mark.parametrize("image", ["python", pytest.param("host", marks=pytest.mark.full)])
def test_what_a_box_wrote_behind_its_snapshot_ends_with_it(bench: Any, image: str) -> None:
    """A snapshot that is kept for a retry does not hold what the policy left in the box that broke."""
    fill = "import os\nopen('large', 'wb').write(bytes(8 << 20))\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"

    async def work(boxes: BubblewrapBoxes) -> bytes:
        box = await boxes.take(replace(SPEC, image=image))
        await box.write("word", b"kept")
        kept: Any = await box.snapshot()
        assert (await box.python(fill)).exit_code == 0
        await box.start(["sleep", "1000"])
        await box.close()
        while (disk := os.fstatvfs(kept.layers[0]._file)).f_files - disk.f_ffree > 100:
            await asyncio.sleep(0)
        while (disk := os.fstatvfs(kept.layers[0]._file)).f_blocks - disk.f_bfree > 100:
            await asyncio.sleep(0)
        fork = await (await boxes.take(SPEC)).fork(kept)
        return await fork.read("word")

    assert bench.run(work) == b"kept"


@pytest.mark.parametrize("image", ["python", "host"])
def test_a_full_disk_stops_no_snapshot(bench: Any, image: str) -> None:
    """Commands that used up every file, or every byte, spoil their own work alone."""
    fill = "import os\ntry:\n    for number in range(9999): os.mkdir(str(number))\nexcept OSError: print('full')"

    async def work(box: Any) -> list[str]:
        await box.write("prepared", b"1")
        await box.snapshot()
        said = []
        for _ in range(3):
            said.append((await box.python(fill)).stdout)
            fork = await box.fork(await box.snapshot())
            said.append((await fork.exec(["sh", "-c", "rmdir 0 && echo forked"])).stdout)
            await fork.close()
        assert "No space left" in (await box.exec("cat /dev/zero > large; head -c 2M /dev/zero > /tmp/f")).stderr
        kept = [await box.snapshot(), await box.snapshot()]
        assert [await (await box.fork(snapshot)).read("prepared") for snapshot in kept] == [b"1", b"1"]
        return said

    assert bench.box(work, replace(SPEC, image=image, disk_bytes=1 << 20)) == ["full\n", "forked\n"] * 3


def test_what_a_verifier_cannot_remove_is_no_silence(bench: Any) -> None:
    """The policy removed a folder that was prepared; a file's name cannot stand for it."""

    async def work(box: Any) -> None:
        await box.write("out/answer", b"prepared")
        await box.snapshot()
        await box.exec(["rm", "-r", "out"])
        with pytest.raises(OSError, match="Is a directory"):
            await box.verifier(["out"])

    bench.box(work, SPEC)


def test_a_tree_that_changes_while_it_is_read(bench: Any) -> None:
    """A command moves folders and puts links in their place: nothing outside of the tree is read, and what goes away is
    no error."""
    swap = """
import os
print("begun", flush=True)
while True:
    os.rename("tree/a", "aside")
    os.symlink("/usr/share", "tree/a")
    os.unlink("tree/a")
    os.rename("aside", "tree/a")
"""

    async def work(box: Any) -> set[str]:
        await box.upload({f"tree/a/{number}": b"x" for number in range(5)} | {"tree/b": b"y"})
        process = await box.start(["python3", "-c", swap])
        while not (await process.output()).stdout:
            await asyncio.sleep(0)
        found: set[str] = set()
        for _ in range(20):
            found |= set(await box.download("tree"))
            found |= set(await box.entries("tree"))
        return found

    assert bench.box(work, SPEC) <= {"a", "b", *(f"a/{number}" for number in range(5))}


def test_a_tree_of_too_many_folders_is_the_policys_failure(bench: Any) -> None:
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)"

    async def work(boxes: BubblewrapBoxes) -> None:
        box = await boxes.take(SPEC)
        await box.python(deep)
        with pytest.raises(SpoiltFile, match="too long"):
            await box.download()
        wide = await boxes.take(SPEC)
        await wide.python("import os\nfor number in range(600): os.makedirs(f'{number}/inner')")
        assert len(await wide.download()) == 1200  # more than may be open

    bench.run(work)
