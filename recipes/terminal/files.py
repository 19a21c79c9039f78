"""Tasks with files: moved, renamed, copied, deleted, made executable, linked, and found by what they are."""

from __future__ import annotations

from random import Random
from typing import Any

from kind import FEW, NAMES, Data, by_tree, dropped, kinds, parts, text, words

from sparring.protocols import Sandbox


def move(random: Random) -> dict[str, Any]:
    """Two files into a folder."""
    a, b, folder, other = random.sample(FEW, 4)
    one, two, rest = (text(words(random, 1, 3)) for _ in range(3))
    before = {a: one, b: two, folder: None, other: rest}
    after = {f"{folder}/{a}": one, f"{folder}/{b}": two, other: rest}
    return parts(f"Move {a} and {b} into {folder}.", before, after, f"mv {a} {folder}", f"mv {b} {folder}")


def rename(random: Random) -> dict[str, Any]:
    """Two files get other names."""
    a, b, c, d = random.sample(FEW, 4)
    one, two = (text(words(random, 1, 3)) for _ in range(2))
    prompt = f"Rename {a} to {b} and {c} to {d}."
    return parts(prompt, {a: one, c: two}, {b: one, d: two}, f"mv {a} {b}", f"mv {c} {d}")


def copy(random: Random) -> dict[str, Any]:
    """Two files get a copy."""
    a, b, c, d = random.sample(FEW, 4)
    one, two = (text(words(random, 1, 3)) for _ in range(2))
    after = {a: one, b: one, c: two, d: two}
    return parts(f"Copy {a} to {b} and {c} to {d}.", {a: one, c: two}, after, f"cp {a} {b}", f"cp {c} {d}")


def delete(random: Random) -> dict[str, Any]:
    """Two files of four."""
    a, b, *rest = random.sample(FEW, 4)
    after = {name: text(words(random, 1, 3)) for name in rest}
    return parts(f"Delete {a} and {b}.", {a: "", b: "", **after}, after, f"rm {a}", f"rm {b}")


def mode(random: Random) -> dict[str, Any]:
    """Two files of four become executable."""
    a, b, *rest = random.sample(FEW, 4)
    before = {name: text(words(random, 1, 3)) for name in (a, b, *rest)}
    after = before | {name: {"text": before[name], "executable": True} for name in (a, b)}
    return parts(f"Make {a} and {b} executable.", before, after, f"chmod +x {a}", f"chmod +x {b}")


def link(random: Random) -> dict[str, Any]:
    """Two symbolic links."""
    a, b, c, d = random.sample(FEW, 4)
    before = {b: text(words(random, 1, 3)), d: text(words(random, 1, 3))}
    after = before | {a: {"link": b}, c: {"link": d}}
    prompt = f"Make {a} a symbolic link to {b} and {c} one to {d}."
    return parts(prompt, before, after, f"ln -s {b} {a}", f"ln -s {d} {c}")


def biggest(random: Random) -> dict[str, Any]:
    """The largest of some files gets another name."""
    new, big, *rest = random.sample(FEW, 5)
    lines = words(random, 12, 16)
    before = {big: text(lines)} | {name: text(words(random, 1, 4)) for name in rest}
    after = {name: said for name, said in before.items() if name != big} | {new: text(lines)}
    return {
        "prompt": f"Rename the largest file to {new}.", "before": before, "after": after, "looks": 1,
        "commands": ["ls -S", f"mv {big} {new}"],
        "near": [["ls -S"], [f"mv {rest[0]} {new}"], [f"cp {big} {new}"]],
    }  # fmt: skip


def follow(random: Random) -> dict[str, Any]:
    """A file names the one that is to be deleted."""
    note, named, *rest = random.sample(FEW, 4)
    after = {note: text([named])} | {name: text(words(random, 1, 3)) for name in rest}
    return {
        "prompt": f"Delete the file that {note} names.", "before": {named: "", **after}, "after": after, "looks": 1,
        "commands": [f"cat {note}", f"rm {named}"],
        "near": [[f"cat {note}"], [f"rm {note}"], [f"rm {rest[0]}"], [f"rm {named} {note}"]],
    }  # fmt: skip


def old(random: Random) -> dict[str, Any]:
    """Files that were last changed before another one."""
    mark, *names = random.sample(NAMES, 7)
    days = [*random.sample(range(1, 15), 2), *random.sample(range(16, 29), 2), *random.choices([3, 9, 20, 27], k=2)]
    before = {name: text(words(random, 1, 3)) for name in (mark, *names)}
    gone = [name for name, day in zip(names, days, strict=True) if day < 15]
    ages = dict(zip(names, days, strict=True)) | {mark: 15}
    return {
        "prompt": f"Delete every file that was last changed before {mark} was.",
        "before": before, "after": {name: said for name, said in before.items() if name not in gone},
        "setup": [f"touch -d 2020-03-{day:02} {name}" for name, day in ages.items()],
        "commands": [f"find . -type f ! -newer {mark} ! -name {mark} -delete"],
        "near": [[f"rm {gone[0]}"], [f"find . -type f ! -newer {mark} -delete"]],
    }  # fmt: skip


def dedupe(random: Random) -> dict[str, Any]:
    """Files with equal content become one."""
    names = random.sample(NAMES, 8)
    one, two = text(words(random, 2, 3)), text([*words(random, 1, 2), "one"])
    contents = [one, one, one, two, two] + [text([*words(random, 1, 2), number]) for number in range(3)]
    before = dict(zip(names, contents, strict=True))
    after: dict[str, str] = {}
    for name in sorted(before):
        if before[name] not in after.values():
            after[name] = before[name]
    gone = sorted(set(before) - set(after))
    return {
        "prompt": "Of files with the same content, keep only the one whose name is first in the alphabet.",
        "before": before, "after": after,
        "commands": ["md5sum * | sort | awk 'seen[$1]++ {print $2}' | xargs rm"],
        "near": [[f"rm {name}" for name in left] for left in dropped(gone)],
    }  # fmt: skip


async def by_copies(box: Sandbox, data: Data, kept: Any) -> bool:
    """Judge by the tree, in which no two names are of one file."""
    linked = await box.exec(["find", ".", "-type", "f", "-links", "+1"])
    return not linked.exit_code and not linked.stdout and await by_tree(box, data, kept)


KINDS = [
    *kinds("files", move, rename),
    *kinds("files", copy, judge=by_copies),
    *kinds("files", delete, mode, link, biggest, follow, old, dedupe),
]
