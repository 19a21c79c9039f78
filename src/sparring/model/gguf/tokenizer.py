"""The tokenizer of a GGUF file as the files of a checkpoint folder.

The transformers library builds it from the head: vocabulary, merges, added tokens, and how a text is split before it is
merged, where it knows the name of that split. A name that it does not know it splits as GPT-2 does, in silence: such a
name is read here or refused, since the model would read other ids than it was trained on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf import gguf_tokenizer_mapping

from sparring.errors import BadInput, boundary, refusal

AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
"""Names (`tokenizer.ggml.pre`) whose split is GPT-2's."""
DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")
"""Names whose split takes every digit apart, and then is GPT-2's."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a reply (`tokenizer.ggml.*_token_id`)."""


def check_tokenizer(file: Path, fields: Mapping[str, Any]) -> None:
    """Refuse a file without a tokenizer in its head or beside it."""
    if "tokenizer.ggml.tokens" not in fields and not _beside(file).is_file():
        raise refusal(str(file), "a tokenizer in its head", "none", "put the model's tokenizer.json beside it")


def write_tokenizer(file: Path, fields: Mapping[str, Any], out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, the chat template and generation_config.json of a GGUF file into
    `out`. A tokenizer.json that lies beside the file takes the place of the file's.

    Raises:
        BadInput: the file's tokenizer is of an unknown kind, or its split is not known.
    """
    beside = _beside(file)
    if "tokenizer.ggml.tokens" in fields:
        with boundary(BadInput, str(file), "a tokenizer that the library reads", "put its tokenizer.json beside it"):
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer.save_pretrained(out)
        if not beside.is_file():
            _split(out / "tokenizer.json", fields, str(file))
    if beside.is_file():
        shutil.copyfile(beside, out / "tokenizer.json")
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", *ENDS)}
    ends = sorted({ids[name] for name in ENDS if ids[name] is not None})
    named = {"bos_token_id": ids["bos"], "eos_token_id": ends or None, "pad_token_id": ids["padding"]}
    text = json.dumps({key: value for key, value in named.items() if value is not None}, indent=2)
    (out / "generation_config.json").write_text(text + "\n", encoding="utf-8")


def _beside(file: Path) -> Path:
    return file.parent / "tokenizer.json"


def _split(file: Path, fields: Mapping[str, Any], where: str) -> None:
    """Correct how a byte-level tokenizer splits, where the library does not know the name of its split."""
    name = fields.get("tokenizer.ggml.pre", "gpt-2")
    splits = (*gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2)
    if fields.get("tokenizer.ggml.model") != "gpt2" or name in splits:
        return
    if name not in DIGIT_BY_DIGIT:
        do = "put the model's tokenizer.json beside the file"
        raise refusal(where, "a tokenizer.ggml.pre that is known", repr(name), do)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(file))
