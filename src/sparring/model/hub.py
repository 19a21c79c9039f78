"""A checkpoint by folder or by hub name, as a folder on this machine. Torch-free."""

from __future__ import annotations

from pathlib import Path

from sparring.errors import refusal

WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "tokenizer.model")


def local_folder(name: str) -> Path:
    """The folder of a checkpoint. A hub name (`owner/model`) is looked up in the library's cache, then fetched.

    Raises:
        BadInput: there is no such folder, and the hub does not have it or cannot be reached.
    """
    folder = Path(name)
    if (folder / "config.json").is_file():
        return folder
    where = f"model {name}"
    if folder.exists():
        raise refusal(where, "a Hugging Face checkpoint folder", "a folder without config.json", "correct the path")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise refusal(where, "a Hugging Face checkpoint folder or a hub name", "no such folder", "correct the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise refusal(
            where,
            "a folder here or a model on the hub",
            f"{type(error).__name__}: {str(error).splitlines()[0]}",
            "correct the name, or download it and give its folder",
        ) from error
