"""The store of images: every format of archive, nothing half done, layers shared."""

from __future__ import annotations

import asyncio
import bz2
import fcntl
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from archives import config_of, docker_saved, entry, layout, packed, tar_of, tar_of_folder
from image import build

from sparring.errors import BadInput
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.images.image import ImageConfig
from sparring.sandbox.images.store import ImageStore
from sparring.sandbox.verbs import main
from sparring.types import BoxSpec

LOWER = tar_of([entry("etc/name", b"lower"), entry("bin/tool", b"x", mode=0o755)])
UPPER = tar_of([entry("etc/name", b"upper")])
SAID = {
    "Env": ["PATH=/bin", "A=b=c"],
    "WorkingDir": "/work",
    "User": "1000:1000",
    "Entrypoint": ["/bin/tool"],
    "Cmd": ["-x"],
}


def left_behind(store: ImageStore) -> list[str]:
    return [path.name for path in (store.folder / "making").iterdir()]


def test_every_format_gives_the_same_image(store: ImageStore, tmp_path: Path) -> None:
    folder = layout(tmp_path / "oci", LOWER, UPPER, **SAID)
    archives = [folder, packed(folder, tmp_path / "oci.tar"), packed(folder, tmp_path / "oci.tar.gz", "w:gz")]
    archives += [docker_saved(tmp_path / "docker.tar", LOWER, UPPER, **SAID)]
    archives += [layout(tmp_path / f"oci{at}", LOWER, UPPER, pack=pack, **SAID) for at, pack in enumerate(PACKS)]
    lines: list[str] = []
    images = [store.pull(archive, f"app:{at}", told=lines.append) for at, archive in enumerate(archives)]
    assert len({(image.digest, image.layers) for image in images}) == 1
    assert sum("unpacked" in line for line in lines) == 2
    assert images[0].config == ImageConfig(
        environment={"PATH": "/bin", "A": "b=c"},
        folder="/work",
        user="1000:1000",
        entrypoint=("/bin/tool",),
        command=("-x",),
    )
    assert [(tree / "etc/name").read_text() for tree in store.layers(images[0])] == ["lower", "upper"]
    assert store.images() == images
    assert left_behind(store) == []


PACKS = (bytes, bz2.compress, lzma.compress)


def test_layers_are_shared_and_go_with_their_last_image(store: ImageStore, tmp_path: Path) -> None:
    one = store.pull(layout(tmp_path / "one", LOWER), "one")
    two = store.pull(layout(tmp_path / "two", LOWER, UPPER), "two")
    assert two.layers[0] == one.layers[0]
    assert len(list((store.folder / "layers").iterdir())) == 2
    assert store.remove("one") == 0
    assert (store.layers(two)[0] / "etc/name").read_text() == "lower"
    assert store.remove("two") == 2
    assert list((store.folder / "layers").iterdir()) == []
    with pytest.raises(BadInput, match="no such image"):
        store.remove("two")


def test_the_same_layer_over_another_is_another(store: ImageStore, tmp_path: Path) -> None:
    through = tar_of([entry("lib/file", b"x")])
    linked = store.pull(layout(tmp_path / "a", tar_of([entry("lib", link="usr/lib")]), through), "a")
    plain = store.pull(layout(tmp_path / "b", tar_of([entry("lib/")]), through), "b")
    assert (store.layers(linked)[1] / "usr/lib/file").exists()
    assert (store.layers(plain)[1] / "lib/file").exists()


def test_a_box_runs_in_a_pulled_image_whose_layers_stay_as_long(store: ImageStore, tmp_path: Path) -> None:
    parts = [tar_of_folder(folder) for folder in build(tmp_path / "parts")]
    store.pull(layout(tmp_path / "oci", *parts, Env=["GREETING=a=b", "LANG=C"], WorkingDir="/etc"), "small")

    async def work() -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), image_of=store.unpacked)
        try:
            box = await boxes.take(BoxSpec(image="small", user=0, timeout_s=20.0))
            assert (await box.exec("cat /etc/motd; ls /etc; id -u")).stdout == "upper\ngroup\nhosts\nmotd\npasswd\n0\n"
            assert store.remove("small") == 0
            assert (await box.exec("pwd; echo $GREETING $LANG $TZ")).stdout == "/etc\na=b C UTC\n"
            assert await box.read("motd") == b"upper\n"
            assert (await (await box.shell()).run("pwd; echo $GREETING")).stdout == "/etc\na=b\n"
            fork, fresh = (
                await box.fork(await box.snapshot(ends=True)),
                await box.fresh(),
            )  # by the layers, not by the name
            for one in (box, fork, fresh):
                assert (await one.exec("cat /etc/motd")).stdout == "upper\n"
                await one.close()
        finally:
            await boxes.close()

    asyncio.run(work())
    store.pull(layout(tmp_path / "other", UPPER), "other")
    assert store.remove("other") == 3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"Env": ["A=b\0c"]}, "a NUL"),
        ({"Env": ["=x"]}, "a variable without a name"),
        ({"Env": ["A=\ud800"]}, "surrogates not allowed"),
        ({"WorkingDir": "etc"}, "a working directory that is not absolute: 'etc'"),
    ],
)
def test_what_no_process_can_have_is_refused(
    config: dict[str, Any], said: str, store: ImageStore, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        store.pull(layout(tmp_path / "oci", LOWER, **config), "one")
    assert store.images() == []


def test_docker_writes_links_for_equal_layers(store: ImageStore, tmp_path: Path) -> None:
    image = store.pull(docker_saved(tmp_path / "docker.tar", LOWER, UPPER, LOWER, links=True), "one")
    assert len(image.layers) == 3


def spoilt(folder: Path, change: str) -> Path:
    """Spoil one file of a layout: cut, or turned at one byte."""
    blobs = sorted((folder / "blobs/sha256").iterdir(), key=lambda blob: blob.read_bytes()[:1] != b"\x1f")
    layer, data = blobs[0], blobs[0].read_bytes()
    if change == "cut":
        layer.write_bytes(data[: len(data) // 2])
    elif change == "turned":
        layer.write_bytes(data[:-12] + bytes([data[-12] ^ 1]) + data[-11:])
    elif change == "gone":
        layer.unlink()
    elif change == "longer":
        layer.write_bytes(data + b"x")
    elif change == "a pipe":
        layer.unlink()
        os.mkfifo(layer)
    elif change == "no index":
        (folder / "index.json").unlink()
    elif change == "nested index":
        index = json.loads((folder / "index.json").read_text())
        index["manifests"] *= 2
        (folder / "index.json").write_text(json.dumps(index))
    elif change == "no json":
        (folder / "index.json").write_text("[" * 100_000)
    elif change == "a digest that leads away":
        index = json.loads((folder / "index.json").read_text())
        index["manifests"][0]["digest"] = "sha256:../../../../etc/passwd"
        (folder / "index.json").write_text(json.dumps(index))
    return folder


CHANGES = {
    "cut": "digest|whole archive",
    "turned": "digest|whole archive",
    "gone": "a part of the image",
    "longer": "at most",
    "a pipe": "a regular file",
    "no index": "neither an index.json",
    "nested index": "one image for linux",
    "no json": "JSON",
    "a digest that leads away": "a descriptor",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_spoilt_archive_is_refused(store: ImageStore, tmp_path: Path, change: str) -> None:
    with pytest.raises(BadInput, match=CHANGES[change]):
        store.pull(spoilt(layout(tmp_path / "oci", LOWER, bytes(10_000)), change), "one")
    assert (store.images(), left_behind(store)) == ([], [])


def test_zstd_is_refused_by_name(store: ImageStore, tmp_path: Path) -> None:
    archive = layout(tmp_path / "oci", LOWER, pack=lambda layer: b"\x28\xb5\x2f\xfd" + layer)
    with pytest.raises(BadInput, match="zstd"):
        store.pull(archive, "one")


def test_a_tar_cut_anywhere_is_refused(store: ImageStore, tmp_path: Path) -> None:
    whole = packed(layout(tmp_path / "oci", LOWER, UPPER), tmp_path / "oci.tar").read_bytes()
    packed_again = gzip.compress(whole)
    cuts = [whole[:at] for at in (0, 1, 511, 512, 700, 1024, 2048, len(whole) // 2)]
    cuts += [packed_again[:at] for at in (1, 2, 9, 20, len(packed_again) // 2, len(packed_again) - 1)]
    for at, data in enumerate(cuts):
        cut = tmp_path / f"{at}.tar"
        cut.write_bytes(data)
        with pytest.raises(BadInput, match=str(cut)):
            store.pull(cut, "one")
    assert (store.images(), left_behind(store)) == ([], [])


def test_a_content_with_another_digest_is_refused(store: ImageStore, tmp_path: Path) -> None:
    file = docker_saved(tmp_path / "docker.tar", LOWER)
    other = tar_of([entry("etc/name", b"LOWER"), entry("bin/tool", b"x", mode=0o755)])
    file.write_bytes(file.read_bytes().replace(LOWER, other))
    with pytest.raises(BadInput, match="bytes whose digest is"):
        store.pull(file, "one")
    file = docker_saved(tmp_path / "docker.tar", LOWER)
    file.write_bytes(file.read_bytes().replace(config_of([LOWER]), config_of([LOWER]).replace(b'"linux"', b'"linuX"')))
    with pytest.raises(BadInput, match="bytes whose digest is"):
        store.pull(file, "one")


def test_loops_of_links_in_an_archive_are_refused(store: ImageStore, tmp_path: Path) -> None:
    file = tmp_path / "loop.tar"
    file.write_bytes(tar_of([entry("manifest.json", link="other"), entry("other", link="manifest.json")]))
    with pytest.raises(BadInput, match="a loop of links"):
        store.pull(file, "one")


def test_a_name_must_be_free_and_plain(store: ImageStore, tmp_path: Path) -> None:
    one, other = layout(tmp_path / "one", LOWER), layout(tmp_path / "two", UPPER)
    for name in ("", "../x", "a b", "a\n", "-x", "x" * 200, "é"):
        with pytest.raises(BadInput, match="an image's name: expected letters, digits and"):
            store.pull(one, name)
    for name in ("python", "host"):
        with pytest.raises(BadInput, match=f"expected a name that is free, got '{name}', which is taken"):
            store.pull(one, name)
    image = store.pull(one, "a" + "/" * 121)
    assert (store.image(image.name), store.remove(image.name)) == (image, 1)
    image = store.pull(one, "org/app:1.0")
    assert store.pull(one, "org/app:1.0") == image
    with pytest.raises(BadInput, match="a name that is free"):
        store.pull(other, "org/app:1.0")
    assert store.images() == [image]


def test_two_pulls_at_once_make_one_image(store: ImageStore, tmp_path: Path) -> None:
    layers = [tar_of([entry(f"f{at}-{number}", b"x") for number in range(100)]) for at in range(4)]
    archive = layout(tmp_path / "oci", *layers)
    images, start = [], threading.Barrier(4)

    def pull() -> None:
        start.wait()
        images.append(store.pull(archive, "one"))

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 4 and len(set(images[0].layers)) == 4
    assert (images == [images[0]] * 4, left_behind(store)) == (True, [])


def test_a_pull_opens_the_folders_that_another_has_just_made(store: ImageStore, tmp_path: Path) -> None:
    archive = layout(tmp_path / "oci", tar_of([entry("f", b"x")]))
    store.pull(archive, "one")
    (store.folder / "layers").chmod(0o700)
    store.pull(archive, "two")
    assert (store.folder / "layers").stat().st_mode & 0o777 == 0o755


PULL = """
import os, signal, sys
from pathlib import Path
from typing import Any
from sparring.sandbox.images.store import ImageStore
from sparring.sandbox.images.unpack import LayerTree
count, at, add = 0, int(sys.argv[3]), LayerTree._add
def counted(*arguments):
    global count
    count += 1
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)
    add(*arguments)
LayerTree._add = counted
ImageStore(Path(sys.argv[1])).pull(Path(sys.argv[2]), "one")
"""


@pytest.mark.parametrize("at", [1, 30, 50])
def test_a_killed_pull_leaves_nothing_that_looks_whole(store: ImageStore, tmp_path: Path, at: int) -> None:
    archive = layout(
        tmp_path / "oci",
        *(tar_of([entry(f"f{n}", b"x") for n in range(20)] + [entry(f"g{m}", b"x")]) for m in range(3)),
    )
    done = subprocess.run([sys.executable, "-c", PULL, store.folder, archive, str(at)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.images() == []
    assert len(list((store.folder / "layers").iterdir())) == (at - 1) // 21
    assert len(left_behind(store)) == 2
    image = store.pull(archive, "one")
    assert ([len(list(tree.iterdir())) for tree in store.layers(image)], left_behind(store)) == ([21] * 3, [])


def test_the_folder_of_a_living_pull_stays(store: ImageStore, tmp_path: Path) -> None:
    store.pull(layout(tmp_path / "one", LOWER), "one")
    living = store.folder / "making/.scratch-living00"
    living.mkdir()
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    store.pull(layout(tmp_path / "two", UPPER), "two")
    assert living.exists()
    os.close(lock)
    store.remove("one")
    assert left_behind(store) == []


def test_the_command_line(store: ImageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = layout(tmp_path / "oci", LOWER)
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(store.folder.parent)
    try:
        assert main(["image", "pull", str(archive), "--as", "app:1"]) == 0
        assert main(["image", "list"]) == 0
        assert [layer.parent for layer in ImageStore().unpacked("app:1").layers] == [
            store.folder.parent / "sparring/images/layers"
        ]
        assert main(["image", "pull", str(archive), "--as", "b", "--most-files", "1"]) == 2
        assert main(["image", "pull", str(archive), "--as", "b", "--most-bytes", "0"]) == 2
        assert main(["image", "pull", str(tmp_path / "absent"), "--as", "b"]) == 2
        assert main(["image", "pull", "n" * 300, "--as", "b"]) == 2
        assert main(["image", "remove", "app:1"]) == 0
        assert main(["image", "remove", "app:1"]) == 2
    finally:
        os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.__setitem__("XDG_CACHE_HOME", before)
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["app:1", "NAME", "app:1", "removed"]
    assert "in 1 files" in said.err
    gone, name = [f"expected an archive of an image, got {what}" for what in ("No such file", "File name too long")]
    assert gone in said.err and name in said.err and "by `docker save`" not in said.err
