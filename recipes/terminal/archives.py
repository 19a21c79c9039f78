"""Tasks with archives. The policy's archives are data: they are read in this process, at most `MOST_BYTES` of each file in
them, and nothing of them is written anywhere; those of tar are unpacked in a verifier too."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from random import Random
from typing import Any

from kind import MOST_BYTES, NAMES, Data, alike, dropped, found, kinds, text, tree, words

from sparring.protocols import Sandbox


def reader(read: Callable[[bytes], dict[str, bytes | None] | None]) -> Callable[[Sandbox, Data, Any], Any]:
    """Return a judge of tasks whose `archive` is one file: what is in it, by `read`, is `inside`, and around it is
    `after`."""

    async def judge(box: Sandbox, data: Data, kept: Any) -> bool:
        work = await found(box)
        archive = work.pop(data["archive"], None)
        if archive is None or archive.kind != "file" or not alike(work, tree(data["after"])):
            return False
        inside = {name: None if said is None else said.encode() for name, said in data["inside"].items()}
        return read(archive.data) == inside

    return judge


def gunzipped(data: bytes) -> bytes | None:
    """Return what streams of gzip hold, one behind the other; None for anything else, and for more than `MOST_BYTES`."""
    plain = b""
    while True:
        stream = zlib.decompressobj(wbits=31)
        try:
            plain += stream.decompress(data, MOST_BYTES + 1 - len(plain))
        except zlib.error:
            return None
        if not stream.eof or len(plain) > MOST_BYTES:
            return None
        if not (data := stream.unused_data):
            return plain


def in_tar(data: bytes) -> dict[str, bytes | None] | None:
    """Return the files of a tar that gzip compressed, and the folders (None) that lead to them or are in it; None where
    there is anything else."""
    inside = dict[str, bytes | None]()
    try:
        with tarfile.open(fileobj=io.BytesIO(gunzipped(data) or b""), mode="r:") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
                    return None
                file = archive.extractfile(member)
                inside |= dict.fromkeys(map(str, path.parents[:-1]))
                inside[str(path)] = None if file is None else file.read()
    except (tarfile.TarError, ValueError, OSError):
        return None
    return inside


async def unpacks(box: Sandbox, data: Data, kept: Any) -> bool:
    """Judge a tar that gzip compressed by what tar makes of it in a verifier, if it reads here as it should: `inside`.
    Around it is `after`."""
    if not await reader(in_tar)(box, data, kept):
        return False
    verifier = await box.verifier([data["archive"]])
    try:
        done = await verifier.exec(f"mkdir /tmp/out && exec tar xzf {data['archive']} -C /tmp/out")
        return not done.exit_code and alike(await found(verifier, "/tmp/out"), tree(data["inside"]))
    finally:
        await verifier.close()


def _is_unpacked(member: zipfile.ZipInfo) -> bool:
    """Return whether every program unpacks a member under its name, as what it is, and so that it can be read."""
    name, mode = member.filename, member.external_attr >> 16
    parts = name.removesuffix("/").split("/")
    while len(parts) > 1 and parts[0] == ".":
        del parts[0]
    right, said = (stat.S_IFDIR | 0o700, 0x10) if member.is_dir() else (stat.S_IFREG | 0o400, 0)
    return (
        not any(part in ("", ".", "..") or "\\" in part for part in parts)
        and member.orig_filename == name
        and b"up" not in member.extra  # another name, in Unicode
        and (mode == 0 or mode & (0o170100 | right) == right)
        and member.external_attr & 0x10 in (0, said)
    )


def in_zip(data: bytes) -> dict[str, bytes | None] | None:
    """Return the files and folders (None) of a zip; None where it cannot be read, or holds too much."""
    inside, most = dict[str, bytes | None](), MOST_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                name = member.filename.removeprefix("./").removesuffix("/")
                if name in inside or most < 0 or not _is_unpacked(member):
                    return None
                with archive.open(member) as file:
                    content = file.read(most + 1)
                most -= len(content) + 1
                inside[name] = None if member.is_dir() else content
    except Exception:  # each way of packing has errors of its own, and what cannot be read is wrong
        return None
    return inside if most >= 0 else None


def in_gzip(data: bytes) -> dict[str, bytes | None] | None:
    """Return the content of a file that gzip compressed, under the name ""."""
    plain = gunzipped(data)
    return None if plain is None else {"": plain}


def pack(random: Random) -> dict[str, Any]:
    """A folder becomes an archive."""
    folder, name, a, b, other = random.sample(NAMES, 5)
    files = {f"{folder}/{file}": text(words(random, 1, 4)) for file in (a, b)}
    rest = {other: text(words(random, 1, 3))}
    commands = [f"tar czf {name}.tar.gz {folder}", f"rm -r {folder}"]
    return {
        "prompt": f"Pack the folder {folder} into {name}.tar.gz, so that it unpacks as the folder {folder}, and delete the "
        "folder.",
        "before": {**files, **rest}, "after": rest,
        "archive": f"{name}.tar.gz", "inside": {folder: None, **files}, "commands": commands,
        "near": [*dropped(commands), [f"tar cf {name}.tar.gz {folder}", commands[1]],
                 [f"tar czf {name}.tar.gz -C {folder} .", commands[1]],
                 [f"tar czf {name}.tar.gz {folder}/{a}", commands[1]]],
    }  # fmt: skip


def unpack(random: Random) -> dict[str, Any]:
    """An archive becomes a folder."""
    folder, name, a, b, other = random.sample(NAMES, 5)
    files = {f"{folder}/{file}": text(words(random, 1, 4)) for file in (a, b)}
    rest = {other: text(words(random, 1, 3))}
    commands = [f"tar xzf {name}.tar.gz", f"rm {name}.tar.gz"]
    return {
        "prompt": f"Unpack {name}.tar.gz here and delete the archive.", "before": {**files, **rest},
        "after": {**files, **rest}, "setup": [f"tar czf {name}.tar.gz {folder}", f"rm -r {folder}"],
        "commands": commands, "near": [*dropped(commands), [f"tar xzf {name}.tar.gz {folder}/{a}", commands[1]]],
    }  # fmt: skip


def compress(random: Random) -> dict[str, Any]:
    """Two files of three are packed."""
    a, b, c, name = random.sample(NAMES, 4)
    before = {file: text(words(random, 1, 4)) for file in (a, b, c)}
    zips = f"python3 -m zipfile -c {name}.zip"
    return {
        "prompt": f"Make {name}.zip, a ZIP archive of the files {a} and {b}, and leave both where they are.",
        "before": before, "after": before, "archive": f"{name}.zip", "inside": {a: before[a], b: before[b]},
        "commands": [f"{zips} {a} {b}"], "near": [[f"{zips} {a}"], [f"{zips} {a} {b} {c}"], [f"{zips} {a} {b}", f"rm {a}"]],
    }  # fmt: skip


def repack(random: Random) -> dict[str, Any]:
    """A word becomes another in a file that is compressed."""
    name, word, new = random.sample(NAMES, 3)
    drawn = [*words(random, 2, 4), f"{word} {word}", word]
    random.shuffle(drawn)
    content = text(drawn)
    commands = [f"gunzip {name}.gz", f"sed -i s/{word}/{new}/g {name}", f"gzip {name}"]
    return {
        "prompt": f"The file {name}.gz is compressed by gzip. In what it holds, replace each {word} by {new}; it stays "
        "compressed, under the same name.",
        "before": {name: content}, "setup": [f"gzip {name}"], "after": {}, "archive": f"{name}.gz",
        "inside": {"": content.replace(word, new)}, "commands": commands,
        "near": [*dropped(commands), [f"sed -i s/{word}/{new}/g {name}.gz"]],
    }  # fmt: skip


KINDS = [
    *kinds("archives", pack, programs=("tar", "gzip"), judge=unpacks),
    *kinds("archives", unpack, programs=("tar", "gzip")),
    *kinds("archives", compress, programs=("python3",), judge=reader(in_zip)),
    *kinds("archives", repack, programs=("gzip",), judge=reader(in_gzip)),
]
