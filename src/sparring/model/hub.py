"""A checkpoint by folder, GGUF file or hub name, as a local folder. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from sparring.errors import InfraError, boundary, refusal
from sparring.model.config import ModelConfig
from sparring.model.gguf.cache import SUFFIX, converted, gguf_file
from sparring.model.peft import base_of, is_adapter
from sparring.observe.wait_reports import waiting
from sparring.scratch import scratch
from sparring.user_cache import user_cache

WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "tokenizer.model")
TEMPLATE = "chat_template.jinja"
SAVED = re.compile(r"best|last|step-\d+")
"""Names of saved steps of a run."""
ANSWER_S = 10.0
"""Seconds that the hub may take to answer whether it has a model."""


def local_folder(name: str) -> Path:
    """Return the folder of a checkpoint or an adapter. A GGUF file, or a folder that holds one, is converted at its
    first use. A hub name (`owner/model`) is looked up in the cache of `huggingface_hub`; only a missing model is
    downloaded, so that a resumed run finds the weights that it began with.

    Raises:
        BadInput: there is no such folder, the GGUF file cannot be converted, or the hub does not have the model or
            cannot be reached.
    """
    folder = Path(name)
    if (folder / "config.json").is_file() or is_adapter(folder):
        return folder
    file = gguf_file(folder)
    if file is not None:
        return converted(file)
    where = f"model {name}"
    if folder.exists():
        given = "a folder without config.json or GGUF file" if folder.is_dir() else "a file of another kind"
        raise refusal(where, "a Hugging Face checkpoint folder or a GGUF file", given, "correct the path")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(SUFFIX):
        remedy = "correct the path"
        if SAVED.fullmatch(folder.name):
            remedy += f"; a saved step of a run is written out first: sparring export {name} FOLDER"
        raise refusal(where, "a Hugging Face checkpoint folder or a hub name", "no such folder", remedy)
    try:
        with boundary(InfraError, "hub"):
            return _find_cached(name) or _download(name)
    except InfraError as error:
        raise refusal(
            where,
            "a folder here or a model on the hub",
            str(error).splitlines()[0],
            "correct the name, or download it and give its folder",
        ) from error


def model_folder(spec: ModelConfig) -> Path:
    """Return the folder of a recipe's model that has a path, with the recipe's chat template. Raises BadInput if an
    adapter is given a template, which belongs to its base."""
    folder = local_folder(str(spec.path))
    if spec.template is not None and is_adapter(folder):
        remedy = "give the template to its base"
        raise refusal(f"template {spec.template}", "a whole model to write for", f"the adapter {folder}", remedy)
    return with_template(folder, spec.template)


def with_template(folder: Path, template: str | None) -> Path:
    """Return a folder of links to a checkpoint's files, in the user's cache, with another chat template (a Jinja file).
    Without a template, and for an adapter, whose base has the template, return `folder` itself."""
    if template is None or is_adapter(folder):
        return folder
    text = template_text(template)
    files = {file.name: file.resolve() for file in sorted(folder.iterdir()) if file.is_file()}
    files.pop(TEMPLATE, None)
    stats = [(name, str(file), file.stat().st_size, file.stat().st_mtime_ns) for name, file in files.items()]
    out = user_cache("templates") / hashlib.sha256(repr((text, stats)).encode()).hexdigest()[:24]
    if not out.is_dir():
        _link(files, text, out, Path(template).stat().st_mtime_ns)
    return out


def template_text(file: str) -> str:
    """Read a chat template. Raises BadInput if the file is no text file."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise refusal(f"template {file}", "a text file in Jinja", str(error), "correct the path") from error


def _link(files: dict[str, Path], template: str, out: Path, changed_ns: int) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch(out.parent) as folder:
            staging = folder / out.name
            staging.mkdir()
            for name, file in files.items():
                (staging / name).symlink_to(file)
            (staging / TEMPLATE).write_text(template, encoding="utf-8")
            os.utime(staging / TEMPLATE, ns=(changed_ns, changed_ns))  # the time of the original
            if not out.is_dir():
                os.rename(staging, out)
    except OSError as error:
        raise refusal(str(out), "a place for links", str(error), "set XDG_CACHE_HOME to another place") from error


def base_folder(path: str | Path) -> Path:
    """Return the folder of the checkpoint that an adapter was trained on; any other folder itself. Raises the errors of
    `local_folder` and `base_of`."""
    return local_folder(base_of(path)) if is_adapter(path) else Path(path)


def _find_cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(WANTED), local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _complete(folder) else None


def _download(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    with waiting(f"the download of {name}"):
        HfApi().model_info(name, timeout=ANSWER_S)  # the download itself would wait for an answer without end
        return Path(snapshot_download(name, allow_patterns=list(WANTED)))


def _complete(folder: Path) -> bool:
    """Return True if a download has config, tokenizer and every file of weights."""
    index = folder / "model.safetensors.index.json"
    weights = ["model.safetensors"]
    if index.is_file():
        weights = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / file).is_file() for file in {"config.json", "tokenizer.json", *weights})
