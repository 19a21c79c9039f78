"""Padding of a reward model. transformers reads the score of a text at its last id that is no padding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name a tokenizer's padding."""
ENDS = ("eos_token_id", "bos_token_id")


def scored_part(text: Sequence[int], pad: int | None) -> Sequence[int]:
    """Return a text up to where transformers reads its score: the last id that is no padding, or else the first id."""
    end = len(text)
    while end > 1 and text[end - 1] == pad:
        end -= 1
    return text[:end]


def write_padding(folder: Path, config: dict[str, Any], rows: int) -> None:
    """Give a new reward model a padding token that no text contains, in `config` (its config.json) and in the files of
    its tokenizer in `folder`. If its present padding may be in a text, the last special token below `rows` (of the
    embedding) that no text contains replaces it; without such a token there is no padding."""
    inner = config.get("text_config") or config
    tokens = {id: token for id, token in _unwritten(folder, config, inner).items() if id < rows}
    before = inner.get("pad_token_id", config.get("pad_token_id"))
    pad: Any = before if before in tokens else max(tokens, default=None)
    for settings in (config, inner):
        settings["pad_token_id"] = pad
    for file in (folder / name for name in NAMES if pad is not None):
        if file.is_file():
            named = {**_read(file), "pad_token": tokens[pad]}
            file.write_text(json.dumps(named, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _unwritten(folder: Path, *configs: dict[str, Any]) -> dict[int, str]:
    """Return the special tokens, by id, that begin or end no text and that the chat template does not write."""
    named, generation = _read(folder / NAMES[0]), _read(folder / "generation_config.json")
    ids = [settings.get(key) for settings in (*configs, generation) for key in ENDS]
    taken = {id for each in ids for id in (each if isinstance(each, list) else [each])}
    written = [json.dumps([named.get(key) for key in ("chat_template", "eos_token", "bos_token")], ensure_ascii=False)]
    written += [file.read_text(encoding="utf-8") for file in folder.rglob("*.jinja")]
    return {
        token["id"]: token["content"]
        for token in _read(folder / "tokenizer.json").get("added_tokens", [])
        if token["special"] and token["id"] not in taken and not any(token["content"] in text for text in written)
    }


def _read(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return data
