"""Files of a checkpoint other than its weights: configuration, tokenizer, settings of generation, chat template. A
server that lacks the checkpoint gets these files over the links of weights, each file as a tensor of bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import xxhash

from sparring.errors import WeightsError, refusal

MODEL = "files"
"""Name that stands for the model in the `WeightRef` of such files."""

MOST_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "config.json": 4 << 20,
        "generation_config.json": 1 << 20,
        "tokenizer.json": 128 << 20,
        "tokenizer_config.json": 16 << 20,
        "special_tokens_map.json": 4 << 20,
        "chat_template.jinja": 4 << 20,
    }
)
"""Maximum number of bytes of each file, by name; files of other names are not sent."""

PASSING = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Keys of config.json that say nothing about the model: its dtype is a setting of the run."""


def read(folder: Path) -> dict[str, bytes]:
    """Read the files that a checkpoint folder has, by name; refuse one that is too large, and a folder without
    config.json (`BadInput`)."""
    found = {}
    for name, most in MOST_BYTES.items():
        if (file := folder / name).is_file() and (size := file.stat().st_size):
            if size > most:
                raise refusal(str(file), f"at most {most} bytes", str(size), "check the checkpoint")
            found[name] = file.read_bytes()
    if "config.json" not in found:
        raise refusal(str(folder), "a checkpoint folder with config.json", "none", "check the model's path")
    return found


def digest(files: Mapping[str, bytes]) -> str:
    """Return xxh3-128 over names and contents of files, in hexadecimal digits. The keys `PASSING` of config.json are
    left out."""
    hashed = xxhash.xxh3_128()
    for name, data in sorted(files.items()):
        if name == "config.json":
            data = _describing(data)
        hashed.update(f"{name}\0{len(data)}\0".encode())
        hashed.update(data)
    return hashed.hexdigest()


def _describing(config: bytes) -> bytes:
    try:
        values = json.loads(config)
        return json.dumps({key: values[key] for key in sorted(values.keys() - set(PASSING))}, sort_keys=True).encode()
    except (ValueError, AttributeError):
        return config  # whoever loads it refuses it


def tensors(files: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """Return each file's bytes as uint8 [size]."""
    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in files.items()}


def contents(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the contents of files from their tensors, which may come from a hostile sender. Raises WeightsError if a
    name is not in `MOST_BYTES`, a tensor is not of bytes, a file is too large, or config.json is missing."""
    for name, tensor in state.items():
        if name not in MOST_BYTES:
            raise WeightsError(f"files: expected only {', '.join(MOST_BYTES)}, got {name!r}; send these")
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() > MOST_BYTES[name]:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            most = f"at most {MOST_BYTES[name]} bytes of {name}"
            raise WeightsError(f"files: expected {most}, got {found}; send its bytes")
    if "config.json" not in state:
        raise WeightsError("files: expected config.json among them, got none; send it")
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files, as `contents` returns them, into a folder that has none of them. Only the file's owner may read
    them."""
    for name, data in files.items():
        descriptor = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
