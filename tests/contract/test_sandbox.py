"""The contract of `Boxes` and `Sandbox`, for every implementation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sandboxes import SPEC, Bench, in_box

from sparring.errors import SandboxError, SpoiltFile
from sparring.protocols import Boxes
from sparring.types import BoxSpec


def python(bench: Bench, code: str, spec: BoxSpec = SPEC) -> Any:
    return in_box(bench, lambda box: box.python(code), spec)


def test_python_prints(bench: Bench) -> None:
    result = python(bench, "print(6 * 7)")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "42\n", "")
    assert not (result.timed_out or result.out_of_memory or result.truncated)


def test_an_uncaught_exception_prints_python_s_own_traceback(bench: Bench) -> None:
    result = python(bench, "print('before')\ndef f():\n    1 / 0\nf()")
    assert (result.exit_code, result.stdout) == (1, "before\n")
    assert result.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<string>", line 4, in <module>\n'
        '  File "<string>", line 3, in f\n'
        "ZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize(
    ("code", "status", "stderr"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no good')", 1, "no good\n"),
        ("exit(4)", 4, ""),
        ("raise SystemExit(0)", 0, ""),
        ("import os; os.kill(os.getpid(), 15)", 143, ""),
        ("import os; os._exit(9)", 9, ""),
    ],
)
def test_exit_status(bench: Bench, code: str, status: int, stderr: str) -> None:
    result = python(bench, code)
    assert (result.exit_code, result.stderr) == (status, stderr)


@pytest.mark.parametrize("code", ["def", "x = 1\n y = 2", "print('\ud800')", "a\0b"])
def test_code_that_does_not_compile_is_an_observation(bench: Bench, code: str) -> None:
    result = python(bench, code)
    assert result.exit_code == 1
    assert "Error" in result.stderr


def test_code_is_a_main_module_of_its_own(bench: Bench) -> None:
    code = (
        "import pickle\nclass A: pass\nif __name__ == '__main__': print(type(pickle.loads(pickle.dumps(A()))).__name__)"
    )
    assert python(bench, code).stdout == "A\n"
    assert python(bench, "print(sorted(k for k in globals() if not k.startswith('__')))").stdout == "[]\n"


def test_atexit_and_threads_finish(bench: Bench) -> None:
    code = (
        "import atexit, threading\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: print('thread')).start()\nprint('main', flush=True)"
    )
    assert sorted(python(bench, code).stdout.split()) == ["last", "main", "thread"]


def test_unicode_both_ways(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        results = await box.python("print('žluťoučký 🐎')"), await box.exec(["cat"], stdin="ďábelské ódy 🎉\n")
        raw = await box.python("import sys; sys.stdout.buffer.write(b'a\\xffb')")
        return [result.stdout for result in (*results, raw)]

    assert in_box(bench, work) == ["žluťoučký 🐎\n", "ďábelské ódy 🎉\n", "a\ufffdb"]


def test_exec_runs_programs_with_stdin_and_status(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        shell = await box.exec(["sh", "-c", "wc -c; echo oops >&2; exit 7"], stdin="x" * 300_000)
        missing = await box.exec(["no-such-program"])
        refused = await box.exec(["/usr"])
        empty = await box.exec([])
        return shell, missing, refused, empty

    shell, missing, refused, empty = in_box(bench, work)
    assert (shell.exit_code, shell.stdout.strip(), shell.stderr) == (7, "300000", "oops\n")
    assert (missing.exit_code, missing.stderr) == (127, "no-such-program: No such file or directory\n")
    assert (refused.exit_code, refused.stderr) == (126, "/usr: Permission denied\n")
    assert empty.exit_code == 126


def test_stdin_that_nobody_reads_does_not_block(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        result = await box.exec(["true"], stdin="x" * 1_000_000)
        return result, await box.python("input()")

    unread, empty = in_box(bench, work)
    assert unread.exit_code == 0
    assert empty.stderr.endswith("EOFError: EOF when reading a line\n")


def test_files_live_as_long_as_their_box(bench: Bench) -> None:
    async def work(boxes: Boxes) -> Any:
        box = await boxes.take(SPEC)
        await box.python("open('kept', 'w').write('here')")
        kept = await box.exec(["cat", "kept", "/box/kept"])
        imported = await box.write("library.py", b"value = 5"), await box.python("import library; print(library.value)")
        await box.close()
        other = await boxes.take(SPEC)
        return kept.stdout, imported[1].stdout, (await other.python("import os; print(os.listdir('.'))")).stdout

    assert bench(work) == ("herehere", "5\n", "[]\n")


def test_read_and_write_bytes(bench: Bench) -> None:
    data = bytes(range(256)) * 1000

    async def work(box: Any) -> Any:
        await box.write("a/b/c.bin", data)
        size = await box.python("import os; print(os.path.getsize('/box/a/b/c.bin'))")
        back = await box.read("a/b/c.bin"), await box.read("/box/a/b/c.bin")
        return size.stdout, back

    assert in_box(bench, work) == (f"{len(data)}\n", (data, data))


def test_a_folder_is_listed_with_what_each_name_is(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        await box.write("a/b", b"")
        await box.python("import os; os.symlink('a', 'c'); os.mkfifo('d')")
        return await box.entries(), await box.entries("/box/a")

    assert in_box(bench, work) == ({"a": "folder", "c": "link", "d": "other"}, {"b": "file"})


def test_a_file_of_more_bytes_than_are_asked_for_is_refused(bench: Bench) -> None:
    async def work(box: Any) -> None:
        await box.write("a", b"12345")
        assert await box.read("a", 5) == b"12345"
        with pytest.raises(OSError, match="more than 4 bytes"):
            await box.read("a", 4)

    in_box(bench, work)


def test_read_and_write_raise_what_the_file_system_says(bench: Bench) -> None:
    async def work(box: Any) -> None:
        with pytest.raises(FileNotFoundError):
            await box.read("missing")
        with pytest.raises(IsADirectoryError):
            await box.read("/box")
        with pytest.raises(OSError, match="(?i)read-only"):
            await box.write("/dev/new", b"x")
        with pytest.raises(OSError, match="(?i)no space|too large"):
            await box.write("big", bytes(2 << 20))
        assert (await box.python("print('fine')")).stdout == "fine\n"

    in_box(bench, work, BoxSpec(timeout_s=20.0, disk_bytes=1 << 20))


def test_a_fresh_box_has_the_limits_of_its_own_and_nothing_else(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        await box.write("kept", b"here")
        fresh = await box.fresh()
        told = await fresh.python("import os; print(os.listdir('.'), 'x' * 100)")
        await fresh.close()
        still = await box.read("kept")
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.fresh()
        with pytest.raises(SandboxError, match="closed"):
            await box.converse("1", "1")
        return told, still

    told, still = in_box(bench, work, BoxSpec(timeout_s=20.0, output_bytes=10))
    assert (told.stdout, told.truncated, still) == ("[] xx\n[94 bytes missing]\nxxxx\n", True, b"here")


TALKS = "import os\nsay = lambda text: os.write(201, text)\nheard = lambda: os.read(200, 100)\n"


@pytest.mark.parametrize(
    ("asks", "answers", "said"),
    [
        ("say(b'hello'); print(heard())", "say(heard() + b', too')", "b'hello, too'\n"),
        ("print(heard(), os.listdir('.'))", "open('mine', 'w'); say(b'x')", "b'x' []\n"),
        ("print(heard())", "os.kill(os.getpid(), 9)", "b''\n"),
        ("print(heard())", "os.close(201)\nwhile True: pass", "b''\n"),
        ("print('done')", "while True: pass", "done\n"),
        (
            "print(*[n for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])",
            "heard()",
            "0 1 2 200 201\n",
        ),
        ("os.execvp('python3', ['python3', '-c', 'import os; print(os.read(200, 9))'])", "say(b'x')", "b'x'\n"),
    ],
)
def test_two_programs_converse(bench: Bench, asks: str, answers: str, said: str) -> None:
    """Each in a box of its own; the second ends with the first, and what it has said is not lost."""

    async def work(box: Any) -> Any:
        result = await box.converse(TALKS + asks, TALKS + answers)
        return result

    result = in_box(bench, work)
    assert (result.stdout, result.exit_code, result.stderr) == (said, 0, "")


def test_a_conversation_has_a_time_limit(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        silent = await box.converse(TALKS + "print(heard())", "while True: pass")
        endless = await box.converse("while True: pass", "1")
        return silent, endless, await box.python("print(1)", timeout_s=20.0)

    silent, endless, after = in_box(bench, work, BoxSpec(timeout_s=0.3))
    assert (silent.stdout, silent.timed_out) == ("b''\n", False), "the other's time was over first"
    assert (endless.timed_out, after.stdout) == (True, "1\n")


def test_many_conversations_at_once(bench: Bench) -> None:
    """More than there are places: two that wait for each other take one."""

    async def work(box: Any) -> list[str]:
        asked = (box.converse(TALKS + f"say(b'{n}'); print(heard())", TALKS + "say(heard() * 2)") for n in range(24))
        return [result.stdout for result in await asyncio.gather(*asked)]

    assert in_box(bench, work) == [f"b'{n}{n}'\n" for n in range(24)]


def test_two_boxes_at_once_answer_their_own_callers(bench: Bench) -> None:
    async def work(boxes: Boxes) -> list[str]:
        async def one(index: int) -> str:
            box = await boxes.take(SPEC)
            await box.python(f"open('n', 'w').write('{index}')")
            result = await box.python("print(open('n').read())")
            await box.close()
            return result.stdout

        return await asyncio.gather(*map(one, range(24)))

    assert bench(work) == [f"{index}\n" for index in range(24)]


def test_a_broken_time_limit_is_an_observation(bench: Bench) -> None:
    result = python(bench, "print('started', flush=True)\nwhile True: pass", BoxSpec(timeout_s=0.5))
    assert (result.timed_out, result.exit_code, result.stdout) == (True, 137, "started\n")


def test_the_argument_overrides_the_spec_s_time_limit(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        return await box.exec(["sleep", "3600"], timeout_s=0.2), await box.python("while True: pass", timeout_s=0.2)

    assert [result.timed_out for result in in_box(bench, work)] == [True, True]


def test_of_output_beyond_the_limit_head_and_tail_are_kept_without_blocking(bench: Bench) -> None:
    spec = BoxSpec(timeout_s=20.0, output_bytes=100)
    result = python(bench, "import sys\nprint('x' * 10**6)\nprint('done', file=sys.stderr)", spec)
    head, tail = "x" * 50, "x" * 49 + "\n"
    assert (result.stdout, result.stderr) == (f"{head}\n[999901 bytes missing]\n{tail}", "done\n")
    assert (result.truncated, result.missing_bytes, result.exit_code) == (True, 999_901, 0)
    cut = python(bench, "print('é' * 80)", BoxSpec(timeout_s=20.0, output_bytes=101))
    assert cut.stdout == f"{'é' * 25}\n[62 bytes missing]\n{'é' * 24}\n"
    assert cut.missing_bytes == 161 - 2 * 49 - 1


def test_the_same_code_prints_the_same(bench: Bench) -> None:
    code = "import os, time\nprint(hash('a'), {'b', 'a', 'c'}, os.getcwd(), time.tzname, os.getuid(), dict(os.environ))"
    first, second = python(bench, code), python(bench, code)
    assert first.stdout == second.stdout
    assert first.exit_code == 0


def test_a_fork_has_the_files_of_the_snapshot(bench: Bench) -> None:
    async def work(box: Any) -> list[bytes]:
        await box.write("file", b"one")
        kept = await box.snapshot()
        await box.write("file", b"two")
        fork = await box.fork(kept)
        await box.close()
        again = await fork.fork(kept)  # the snapshot outlives its box
        await fork.write("file", b"three")
        found = [await one.read("file") for one in (fork, again)]
        await fork.close()
        await again.close()
        return found

    assert in_box(bench, work) == [b"three", b"one"]


def test_only_named_files_come_into_a_verifier(bench: Bench) -> None:
    async def work(box: Any) -> Any:
        await box.write("prepared", b"as it was")
        kept = await box.snapshot()
        assert (kept.folder, kept.environment, kept.processes) == ("/box", None, ())
        await box.exec(
            ["sh", "-c", "echo x > prepared; echo 42 > answer; echo y > other; mkdir folder; ln -s answer link"]
        )
        verifier = await box.verifier(["answer"], most_bytes=3)
        found = dict(await verifier.entries()), await verifier.read("prepared"), await verifier.read("answer")
        for path, most_bytes in (("answer", 2), ("folder", 3), ("link", 3)):
            with pytest.raises(SpoiltFile):
                await box.verifier([path], most_bytes)
        await verifier.close()
        return found

    assert in_box(bench, work) == ({"answer": "file", "prepared": "file"}, b"as it was", b"42\n")


def test_a_closed_box_has_no_snapshot_and_no_verifier(bench: Bench) -> None:
    async def work(box: Any) -> None:
        await box.close()
        with pytest.raises(SandboxError):
            await box.snapshot()
        with pytest.raises(SandboxError):
            await box.verifier(["answer"])

    in_box(bench, work)
