"""The init stage: a tokenizer trained on the environment's own text, and random weights of the configured shape."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.model.hub import base_folder, local_folder
from sparring.render.chat_template import NAMED
from sparring.stages.context import POLICY, Context, given_checkpoint
from sparring.stages.data.demonstrations import Conversation, conversations

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXTS = 600
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


async def run(context: Context) -> dict[str, Any]:
    """Write a fresh model to `<run>/init/model`, unless `[models.policy] path` names a checkpoint.

    Returns:
        `model`: the folder; for a fresh model also `parameters` and `vocab_size`.
    """
    spec = context.config.models[POLICY]
    if spec.init is None:
        return {"model": str(given_checkpoint(context.config))}
    from tokenizers import Tokenizer

    from sparring.model.create import create

    context.sink.start("init", 1)
    out = context.output("init")
    if spec.init.tokenizer is None:
        fit_tokenizer(await conversations(context, TEXTS), spec.init.vocab_size, out)
    else:
        copy_tokenizer(base_folder(local_folder(spec.init.tokenizer)), out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    create(
        spec.init,
        vocab_size,
        out,
        context.config.run.seed,
        eos_token_id=ends_of(tokenizer),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    return {"model": str(out), "vocab_size": vocab_size, "parameters": _parameters(out)}


def ends_of(tokenizer: Tokenizer) -> list[int] | None:
    """Return the ids of ChatML's tokens that end a turn; None for a copied tokenizer of another format."""
    ids = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    return [id for id in ids if id is not None] or None


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer and the chat format of a checkpoint folder to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            shutil.copy(folder / name, out / name)
    if (folder / NAMED).is_dir():
        shutil.copytree(folder / NAMED, out / NAMED, dirs_exist_ok=True)


def fit_tokenizer(conversations: Sequence[Conversation], vocab_size: int, out: Path) -> None:
    """Train a tokenizer on rendered conversations, cut at special tokens, and write it to `out`.

    The conversations are rendered with a tokenizer without merges, in the same folder, so that tool header, JSON and
    tools' answers have the form that the policy will see.
    """
    from sparring.render.load import load_renderer
    from sparring.render.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer

    renderer = load_renderer(train_tokenizer([], MIN_VOCAB_SIZE, out))
    texts = []
    for conversation in conversations:
        tokens = renderer.render(conversation.messages, conversation.tools, generation=False).tokens
        texts += re.split(r"<\|?/?\w+\|?>", renderer.decode(tokens))
    train_tokenizer([text for text in texts if text], vocab_size, out)


def _parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())
