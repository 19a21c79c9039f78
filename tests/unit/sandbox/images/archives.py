"""Archives of images, written for tests."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def entry(name: str, content: bytes | None = None, *, link: str = "", kind: bytes = b"", mode: int = 0o644) -> Entry:
    """An entry of a layer: a file with its content, or by its kind; a folder where the name ends with a slash."""
    info = tarfile.TarInfo(name.rstrip("/") if content is None and not kind else name)
    info.mode, info.linkname, info.mtime = mode, link, 1_000_000_000
    if content is not None:
        info.size = len(content)
        return info, content
    info.type = kind or (tarfile.SYMTYPE if link else tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE)
    if info.type == tarfile.DIRTYPE:
        info.mode = 0o755 if mode == 0o644 else mode
    return info


def hard(name: str, link: str) -> Entry:
    return entry(name, link=link, kind=tarfile.LNKTYPE)


def tar_of(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for one in entries:
            info, content = one if isinstance(one, tuple) else (one, b"")
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_of_folder(folder: Path) -> bytes:
    """A layer of what a folder has; overlayfs's mark of a removed file becomes OCI's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_char_device():
                tar.addfile(tarfile.TarInfo(str(name.with_name(f".wh.{name.name}"))))
            else:
                tar.add(path, str(name), recursive=False)
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config_of(layers: Sequence[bytes], **config: Any) -> bytes:
    rootfs = {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}
    return json.dumps({"os": "linux", "architecture": ARCHITECTURE, "config": config, "rootfs": rootfs}).encode()


def layout(folder: Path, *layers: bytes, pack: Any = gzip.compress, **config: Any) -> Path:
    """Write an OCI layout of uncompressed layers; `pack` compresses each."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(data), "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "config": put(config_of(layers, **config), "config.v1+json"),
        "layers": [put(pack(layer), "layer.v1.tar+gzip") for layer in layers],
    }
    described = put(json.dumps(manifest).encode(), "manifest.v1+json")
    described["annotations"] = {"org.opencontainers.image.ref.name": "one"}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def packed(folder: Path, file: Path, mode: str = "w") -> Path:
    """Pack a folder into a tar."""
    with tarfile.open(file, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, ".")
    return file


def docker_saved(file: Path, *layers: bytes, links: bool = False, **config: Any) -> Path:
    """Write what `docker save` wrote before version 25; with links, equal layers are links to the first."""
    text = config_of(layers, **config)
    name = f"{hashlib.sha256(text).hexdigest()}.json"
    seen: dict[bytes, str] = {}
    names: list[str] = []
    entries: list[Entry] = [entry(name, text)]
    for at, layer in enumerate(layers):
        names.append(f"{at:064x}/layer.tar")
        if links and layer in seen:
            entries.append(entry(names[-1], link=f"../{seen[layer]}"))
        else:
            entries.append(entry(names[-1], layer))
            seen.setdefault(layer, names[-1])
    told = [{"Config": name, "RepoTags": ["one:latest"], "Layers": names}]
    file.write_bytes(tar_of([*entries, entry("manifest.json", json.dumps(told).encode())]))
    return file
