"""What a kind of terminal task is: how a task is drawn, what is prepared in its box, and how its end state is judged.

Nothing that the policy left runs for the verdict: its processes are ended, and the tree of its folder is read from
outside and compared with the one that is wanted.
"""

from __future__ import annotations

import os.path
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from sparring.errors import EnvError
from sparring.protocols import Sandbox
from sparring.types import TreeEntry

NAMES = ("ash", "bay", "elm", "fig", "fir", "oak", "yew", "red", "blue", "gold", "gray", "pink")
"""Names of files and words in them. None is a part of another."""

FEW = NAMES[:8]
"""Names of the easiest kinds, from which a tiny model learns."""

MOST_BYTES = 1 << 20
"""What the policy's folder may hold in the end, with names; a task needs a few kilobytes."""

Data = Mapping[str, Any]
Tree = dict[str, TreeEntry]


async def nothing(box: Sandbox, data: Data) -> Any:
    """Prepare nothing besides the files."""


async def always(box: Sandbox, data: Data, kept: Any) -> bool:
    """Ask nothing of processes."""
    return True


async def by_tree(box: Sandbox, data: Data, kept: Any) -> bool:
    """Judge by the tree alone."""
    return alike(await found(box), tree(data["after"]))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of tasks.

    Attributes:
        name: of the kind.
        family: files, text, git, archives or services.
        draw: returns a task's data: `prompt`; `before` and `after`, the trees at the beginning and in the end (see
            `tree`); `setup`, commands that prepare the rest; `commands`, which solve it; `near`, lists of commands that
            do not, half of the work or nearly right. With `parts`, each command solves a part of its own; the first
            `looks` of the commands only look at what the others need to know.
        programs: programs that a box needs besides a shell and the usual tools.
        begin: prepares what no file says, after `setup` and before the policy's first command, and returns what the
            verdict needs of it.
        serve: begins programs of the world's own, after the snapshot of which verifiers are forks.
        alive: judges processes while they live.
        judge: judges files when all processes have ended.
    """

    name: str
    family: str
    draw: Callable[[Random], dict[str, Any]]
    programs: tuple[str, ...] = ()
    begin: Callable[[Sandbox, Data], Awaitable[Any]] = nothing
    serve: Callable[[Sandbox, Data], Awaitable[Any]] = nothing
    alive: Callable[[Sandbox, Data, Any], Awaitable[bool]] = always
    judge: Callable[[Sandbox, Data, Any], Awaitable[bool]] = by_tree


def kinds(family: str, *draws: Callable[[Random], dict[str, Any]], **of_all: Any) -> list[Kind]:
    """Return the kinds of some functions, which give them their names."""
    return [Kind(name=draw.__name__, family=family, draw=draw, **of_all) for draw in draws]


def dropped(commands: Sequence[str]) -> list[list[str]]:
    """Return the commands without the first, without the second and so on."""
    return [[*commands[:at], *commands[at + 1 :]] for at in range(len(commands))]


def parts(prompt: str, before: Data, after: Data, *commands: str) -> dict[str, Any]:
    """Return a task of parts that do not hang on one another."""
    near = dropped(commands)
    return {
        "prompt": prompt, "before": before, "after": after, "commands": list(commands), "near": near, "parts": True,
    }  # fmt: skip


def words(random: Random, low: int, high: int) -> list[str]:
    """Draw lines of one word."""
    return random.choices(FEW, k=random.randint(low, high))


def text(lines: Sequence[Any]) -> str:
    """Return lines as a text."""
    return "".join(f"{line}\n" for line in lines)


def tree(told: Data) -> Tree:
    """Return a tree in the form that a box takes: of each path a file's text, {"text", "executable"}, {"link": where
    it leads}, or None for a folder. Folders on the way are added."""
    entries: Tree = {}
    for path, what in told.items():
        folder = os.path.dirname(path)
        while folder:
            entries.setdefault(folder, TreeEntry(kind="folder", executable=True))
            folder = os.path.dirname(folder)
        if what is None:
            entries[path] = TreeEntry(kind="folder", executable=True)
        elif isinstance(what, str):
            entries[path] = TreeEntry(data=what.encode())
        elif "link" in what:
            entries[path] = TreeEntry(kind="link", target=what["link"])
        else:
            entries[path] = TreeEntry(data=what["text"].encode(), executable=what["executable"])
    return entries


async def found(box: Sandbox, folder: str = ".") -> Tree:
    """Return what the policy left in its folder.

    Raises:
        SpoiltFile: it cannot be read, or is too much.
    """
    return dict(await box.download(folder, MOST_BYTES))


def alike(one: Tree, other: Tree) -> bool:
    """Return whether two trees hold the same, but for a line's end at the end of a file."""
    return {path: _plain(path, entry) for path, entry in one.items()} == {
        path: _plain(path, entry) for path, entry in other.items()
    }


def _plain(path: str, entry: TreeEntry) -> tuple[Any, ...]:
    if entry.kind == "file":
        return "file", entry.data.removesuffix(b"\n"), entry.executable
    if entry.kind == "link":
        climbs = "/../" in entry.target.lstrip("./")  # back out of a folder, which has to be there for it
        return "link", entry.target if climbs else os.path.normpath(
            os.path.join("/box", os.path.dirname(path), entry.target)
        )
    return (entry.kind,)


async def setting(box: Sandbox, commands: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run the world's own commands, before the policy's first, and return what they print.

    Raises:
        EnvError: one of them failed.
    """
    if not commands:
        return ""
    done = await box.exec("set -e\n" + "\n".join(commands), environment=environment, timeout_s=20.0)
    if done.exit_code:
        raise EnvError(
            f"preparing a task: expected commands that succeed, got {done.end} {done.exit_code}: {done.stderr}"
        )
    return done.stdout
