"""Layers become what overlayfs stacks: deletions, links and folders as the box will see them, nothing outside."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from archives import Entry, entry, hard, layout, tar_of

from sparring.errors import BadInput
from sparring.sandbox.config import BOX_USER
from sparring.sandbox.images.image import Bounds
from sparring.sandbox.images.store import ImageStore
from sparring.sandbox.mounts import box_identity

BASE = tar_of(
    [
        entry("bin", link="usr/bin"),
        entry("usr/bin/", mode=0o755),
        entry("usr/bin/tool", b"one", mode=0o4755),
        entry("usr/bin/other", link="/usr/bin/tool"),
        hard("usr/bin/third", "usr/bin/tool"),
        entry("etc/", mode=0o555),
        entry("etc/secret", b"x", mode=0o000),
        entry("etc/gone", b"x"),
        entry("var/lib/old/a", b"a"),
        entry("var/lib/kept/a", b"a"),
        entry("srv/was_folder/inner", b"x"),
        entry("srv/was_file", b"x"),
        entry("tmp/", mode=0o1777),
    ]
)
ABOVE = tar_of(
    [
        entry("bin/added", b"two"),
        entry("etc/.wh.gone", b""),
        entry("var/lib/old/.wh..wh..opq", b""),
        entry("var/lib/old/b", b"b"),
        entry("var/lib/.wh.kept", b""),
        entry("var/lib/kept/c", b"c"),
        entry("srv/was_folder", b"file"),
        entry("srv/was_file/", mode=0o755),
        entry("srv/was_file/inner", b"y"),
        hard("usr/bin/linked", "bin/tool"),
        entry("never/.wh.there", b""),
        entry("dev/null", kind=tarfile.CHRTYPE),
        entry("run/pipe", kind=tarfile.FIFOTYPE),
    ]
)
LOOK = """
import json, os, stat, sys
os.chdir(sys.argv[1])
seen = {}
for folder, folders, files in os.walk("."):
    for name in folders + files:
        path = os.path.join(folder, name)[2:]
        kind = os.lstat(path)
        seen[path] = [
            stat.filemode(kind.st_mode),
            os.readlink(path) if stat.S_ISLNK(kind.st_mode) else open(path).read() if stat.S_ISREG(kind.st_mode) else "",
        ]
print(json.dumps(seen))
"""


def mounted(layers: tuple[Path, ...]) -> dict[str, tuple[str, str]]:
    """What a user sees in a real overlay of layers, in a user namespace of his own: modes and contents by path."""
    options = f"userxattr,lowerdir={':'.join(map(str, reversed(layers)))}" + (":/empty" if len(layers) == 1 else "")
    script = f"mkdir /tmp/root && mount -t overlay overlay -o {options} /tmp/root && exec python3 -c '{LOOK}' /tmp/root"
    if len(layers) == 1:
        script = f"exec python3 -c '{LOOK}' {layers[0]}"
    line = ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs tmpfs /tmp && {script}"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd="/", **box_identity())
    assert done.returncode == 0, done.stderr
    return {path: (mode, content) for path, (mode, content) in json.loads(done.stdout).items()}


def test_a_box_sees_what_the_archive_says(store: ImageStore, tmp_path: Path) -> None:
    image = store.pull(layout(tmp_path / "oci", BASE, ABOVE), "one")
    seen = mounted(store.layers(image))
    contents = {path: content for path, (mode, content) in seen.items() if mode[0] == "-"}
    assert contents == {
        "usr/bin/tool": "one",
        "usr/bin/third": "one",
        "usr/bin/linked": "one",
        "usr/bin/added": "two",
        "etc/secret": "x",
        "var/lib/old/b": "b",
        "var/lib/kept/c": "c",
        "srv/was_folder": "file",
        "srv/was_file/inner": "y",
    }
    assert {path: content for path, (mode, content) in seen.items() if mode[0] == "l"} == {
        "bin": "usr/bin",
        "usr/bin/other": "/usr/bin/tool",
    }
    assert seen["run/pipe"][0][0] == "p"
    assert {path: seen[path][0] for path in ("usr/bin/tool", "etc", "etc/secret", "tmp")} == {
        "usr/bin/tool": "-rwxr-xr-x",  # without setuid
        "etc": "drwxr-xr-x",  # its owner may write
        "etc/secret": "-rw-------",
        "tmp": "drwxrwxrwt",
    }
    assert image.left_out == 1


def test_owners_and_attributes_are_dropped(store: ImageStore, tmp_path: Path) -> None:
    info, content = entry("file", b"x")  # type: ignore[misc]
    info.uid, info.uname = 1234, "somebody"
    info.pax_headers = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.security.capability": "x"}
    folder = entry("folder/")
    assert isinstance(folder, tarfile.TarInfo)
    folder.pax_headers = {"SCHILY.xattr.user.overlay.opaque": "y"}
    (tree,) = store.layers(store.pull(layout(tmp_path / "oci", tar_of([(info, content), folder])), "one"))
    assert {(tree / name).stat().st_uid for name in ("file", "folder")} == {os.geteuid() or BOX_USER}
    assert os.listxattr(tree / "folder") == os.listxattr(tree / "file") == []
    assert {(tree / name).stat().st_mtime for name in ("file", "folder")} == {1_000_000_000}


def test_a_layer_that_hides_everything_is_the_lowest(store: ImageStore, tmp_path: Path) -> None:
    above = tar_of([entry(".wh..wh..opq", b""), entry("new", b"x")])
    image = store.pull(layout(tmp_path / "oci", BASE, above), "one")
    assert len(image.layers) == 1
    assert set(mounted(store.layers(image))) == {"new"}


def test_a_deleted_name_that_comes_again_is_new(store: ImageStore, tmp_path: Path) -> None:
    above = tar_of(
        [entry("var/.wh.lib", b""), entry("var/lib/", mode=0o700), entry("usr/.wh.bin", b""), entry("usr/bin", b"file")]
    )
    seen = mounted(store.layers(store.pull(layout(tmp_path / "oci", BASE, above), "one")))
    assert (seen["var/lib"], seen["usr/bin"]) == (("drwx------", ""), ("-rw-r--r--", "file"))
    assert not [path for path in seen if path.startswith(("var/lib/", "usr/bin/"))]


def test_a_file_that_takes_the_place_of_a_link_ends_its_paths(store: ImageStore, tmp_path: Path) -> None:
    above = tar_of([entry("bin/a", b"a"), entry("bin/", mode=0o755), entry("bin/b", b"b")])
    seen = mounted(store.layers(store.pull(layout(tmp_path / "oci", BASE, above), "one")))
    assert ("usr/bin/a" in seen, "bin/b" in seen, "usr/bin/b" in seen) == (True, True, False)


def test_links_stay_within_the_image(store: ImageStore, tmp_path: Path) -> None:
    entries = [
        entry("away", link="/etc"),
        entry("up", link="../../../../../.."),
        entry("away/hostname", b"x"),
        entry("up/etc/second", b"x"),
    ]
    seen = mounted(store.layers(store.pull(layout(tmp_path / "oci", tar_of(entries)), "one")))
    assert {path for path, (mode, _) in seen.items() if mode[0] == "-"} == {"etc/hostname", "etc/second"}


OUT = "/var/tmp"
"""Stands for the folder of the host that hostile archives are after, which has a folder `sub` with a file `inner`."""
OPAQUE = ".wh..wh..opq"


def timed(name: str, mode: int = 0o777) -> Entry:
    """A folder of 1970 that anybody may write to."""
    info = entry(name, mode=mode)
    assert isinstance(info, tarfile.TarInfo)
    info.mtime, info.pax_headers = 1, {"SCHILY.xattr.user.overlay.opaque": "y"}
    return info


AWAY = entry("a", link=OUT)
HOSTILE: dict[str, list[list[Entry]]] = {
    "a parent that becomes a link": [[timed("a/"), timed("a/sub/"), AWAY]],
    "one that was a deeper folder": [[timed("b/"), timed("b/a/"), timed("b/a/sub/"), entry("b/a", link=OUT)]],
    "one that becomes a relative link": [[timed("a/"), timed("a/sub/"), entry("a", link="../../../../../..{out}")]],
    "a folder that becomes a link itself": [[timed("a/"), entry("a", link=f"{OUT}/sub")]],
    "a link by way of a link": [[timed("a/"), timed("a/sub/"), entry("l", link=OUT), entry("a", link="l")]],
    "a link in a lower layer": [[AWAY], [timed("a/"), timed("a/sub/")]],
    "a link in a layer above": [[timed("a/"), timed("a/sub/")], [timed("a/sub/"), AWAY]],
    "a folder over a link, and a link again": [[AWAY], [timed("a/"), timed("a/sub/"), AWAY]],
    "a link after a deletion": [[timed("a/sub/")], [entry(".wh.a", b""), timed("a/sub/"), AWAY]],
    "deletion through a link": [[AWAY, entry("a/.wh.sub", b"")], [entry("a/.wh.sub", b"")]],
    "deletion of what lies behind a link": [[timed("a/sub/"), AWAY, entry("a/sub/.wh.inner", b"")]],
    "a folder emptied through a link": [[AWAY, entry(f"a/sub/{OPAQUE}", b"")], [entry(f"a/{OPAQUE}", b"")]],
    "a folder emptied that becomes a link": [[timed("a/sub/")], [entry(f"a/sub/{OPAQUE}", b""), AWAY]],
    "a hard link to a link": [[entry("l", link=f"{OUT}/sub/inner"), hard("h", "l"), entry("h", b"x", mode=0o4777)]],
    "a hard link through a link": [[AWAY, hard("h", "a/sub/inner")]],
    "a hard link behind what becomes a link": [[entry("a/sub/inner", b"x"), AWAY, hard("h", "a/sub/inner")]],
    "a hard link to a folder's link": [[AWAY, hard("h", "a"), timed("h/sub/")]],
    "a hard link over two layers": [[AWAY], [hard("h", "a"), entry("h/sub/inner", b"x")]],
    "a file through a link": [[entry("l", link=f"{OUT}/sub/inner"), entry("l", b"x", mode=0o777)]],
    "a file in a link's folder": [[AWAY, entry("a/sub/inner", b"x"), entry("a/new", b"x")]],
    "a file in what becomes a link": [[timed("a/sub/"), AWAY, entry("a/sub/inner", b"x", mode=0o777)]],
    "a pipe in what becomes a link": [[timed("a/sub/"), AWAY, entry("a/sub/inner", kind=tarfile.FIFOTYPE)]],
    "a link in what becomes a link": [[timed("a/sub/"), AWAY, entry("a/sub/inner", link="/etc")]],
    "a device in what becomes a link": [[timed("a/sub/"), AWAY, entry("a/sub/inner", kind=tarfile.CHRTYPE)]],
    "a mode behind a link": [[AWAY, timed("a/sub/", mode=0o000)]],
    "a folder in the place of a link": [[AWAY, timed("a/"), entry("a/sub/inner", b"x"), timed("a/sub/")]],
    "the root as a link": [[entry("./", link=OUT, kind=tarfile.SYMTYPE), timed("sub/")]],
    "a path with ..": [[timed("a/../..{out}/sub/")]],
    "an absolute path": [[timed(f"{OUT}/sub/"), entry(f"{OUT}/sub/inner", b"x")]],
    "another spelling": [[timed("a/"), timed("./a//sub/."), entry("a/", link=OUT, kind=tarfile.SYMTYPE)]],
}
"""Layers of each archive."""


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_outside_of_a_layer_is_touched(store: ImageStore, tmp_path: Path, what: str) -> None:
    out = store.folder.parent / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub/inner").write_text("ours")

    def state() -> list[object]:
        kinds = {path: path.lstat() for path in (out, out / "sub", out / "sub/inner")}
        told = [
            (path, kind.st_mode, kind.st_uid, kind.st_nlink, kind.st_mtime_ns, kind.st_ctime_ns, os.listxattr(path))
            for path, kind in kinds.items()
        ]
        return [*told, sorted(out.rglob("*")), (out / "sub/inner").read_text()]

    before = state()
    layers = [tar_of(place(one, out) for one in layer) for layer in HOSTILE[what]]
    with suppress(BadInput):
        store.pull(layout(tmp_path / "oci", *layers), "one")
    assert state() == before


def place(one: Entry, out: Path) -> Entry:
    """An entry with the real folder in its name and its link."""
    info, *content = one if isinstance(one, tuple) else (one,)
    info = info.replace(
        name=info.name.replace("{out}", str(out)).replace(OUT, str(out)),
        linkname=info.linkname.replace("{out}", str(out)).replace(OUT, str(out)),
    )
    return (info, *content) if content else info  # type: ignore[return-value]


BAD: dict[str, tuple[list[Entry], str]] = {
    "a path with ..": ([entry("a/../../b", b"x")], "a path inside the image"),
    "a hard link with ..": ([hard("a", "../../etc/passwd")], "a path inside the image"),
    "a hard link to nothing": ([hard("a", "etc/passwd")], "a link to a file of the image"),
    "a hard link to a folder": ([entry("d/"), hard("a", "d")], "a link to a file of the image"),
    "a hard link through a link": ([entry("l", link="/"), hard("a", "l/etc/passwd")], "a link to a file of the image"),
    "a file as parent": ([entry("a", b"x"), entry("a/b", b"x")], "a folder as parent"),
    "a loop of links as parent": (
        [entry("a", link="b"), entry("b", link="a"), entry("a/c", b"x")],
        "a folder as parent",
    ),
    "links that grow": ([entry("a", link="a/b/c/d"), entry("a/x", b"x")], "a folder as parent"),
    "a device as parent": ([entry("d", kind=tarfile.BLKTYPE), hard("a", "d")], "a link to a file of the image"),
    "a name that is too long": ([entry("n" * 300, b"x")], "an entry that can be unpacked"),
    "folders without end": ([entry("d/" * 2000 + "x", b"x")], "at most 256 folders above an entry"),
    "an unknown kind": ([entry("a", kind=b"Z")], "a file, folder, link or pipe"),
    "a deleted ..": ([entry("a/.wh...", b"")], "the name of a deleted entry"),
    "a link without a target": ([entry("a", kind=tarfile.SYMTYPE)], "an entry that can be unpacked"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_entry_is_refused_by_name(store: ImageStore, tmp_path: Path, what: str) -> None:
    entries, expected = BAD[what]
    with pytest.raises(BadInput, match=expected) as refused:
        store.pull(layout(tmp_path / "oci", tar_of(entries)), "one")
    assert "oci" in str(refused.value)
    assert left_behind(store) == []


def left_behind(store: ImageStore) -> list[str]:
    """What lies in a store's folders."""
    return [path.name for name in ("images", "layers", "making") for path in (store.folder / name).iterdir()]


def test_bombs_are_bounded(store: ImageStore, tmp_path: Path) -> None:
    many = tar_of([entry(f"f{number}", b"") for number in range(200)])
    with pytest.raises(BadInput, match="at most 100 files"):
        store.pull(layout(tmp_path / "many", many), "one", Bounds(num_entries=100))
    twice = tar_of([entry("a", b"x" * 6000), entry("b", b"x" * 6000)])
    with pytest.raises(BadInput, match="at most 10000 bytes"):
        store.pull(layout(tmp_path / "large", twice), "one", Bounds(num_bytes=10_000))
    layers = [tar_of([entry(f"f{number}", b"x" * 6000)]) for number in range(2)]
    with pytest.raises(BadInput, match="bytes"):
        store.pull(layout(tmp_path / "two", *layers), "one", Bounds(num_bytes=11_000))
    store.pull(layout(tmp_path / "fits", *layers), "one", Bounds(num_bytes=32_000))
    zeros = tar_of([entry("f", b"x")]) + bytes(8 << 20)
    with pytest.raises(BadInput, match="at most 1000000 bytes"):
        store.pull(layout(tmp_path / "zeros", zeros), "two", Bounds(num_bytes=1_000_000))


def test_a_header_of_gigabytes_is_not_read(store: ImageStore, tmp_path: Path) -> None:
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE):
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = kind, 8 << 30
        layer = info.tobuf(tarfile.GNU_FORMAT) + bytes(4 << 20)
        with pytest.raises(BadInput, match="headers of at most"):
            store.pull(layout(tmp_path / kind.decode(), layer), "one")
    chain = b"".join(tarfile.TarInfo.create_pax_global_header({"comment": "x"}) for _ in range(3000))
    with pytest.raises(BadInput, match="headers of at most|entries of a tar"):
        store.pull(layout(tmp_path / "chain", chain + tar_of([entry("f", b"x")])), "one")


def test_a_spoilt_header_is_not_the_end(store: ImageStore, tmp_path: Path) -> None:
    layer = bytearray(tar_of([entry("a", b"x"), entry("b", b"x")]))
    layer[1024:1100] = b"z" * 76
    with pytest.raises(BadInput, match="a spoilt header"):
        store.pull(layout(tmp_path / "oci", bytes(layer)), "one")


def test_sparse_files_are_refused(store: ImageStore, tmp_path: Path) -> None:
    info = tarfile.TarInfo("f")
    info.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(BadInput, match="a sparse file"):
        store.pull(layout(tmp_path / "oci", info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)), "one")
