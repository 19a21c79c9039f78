"""Training of a small tokenizer: byte-level BPE with the special tokens and the chat format of the Qwen3 family."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sparring.errors import refusal

# Splits a text before merging, as the Qwen2 and Qwen3 tokenizers do: words with one leading mark, digits in groups of
# at most DIGITS, runs of other marks, newlines apart from other space. (Qwen2 technical report, 2024; vocabulary file
# of the family.)
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# In the family's order. Decoding may skip the special tokens; the others are content, but never split.
_SPECIAL = (
    *(END_OF_TEXT, TURN_START, TURN_END),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_CONTENT = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
_BYTES = 256
MIN_VOCAB_SIZE = _BYTES + len(_SPECIAL) + len(_CONTENT)


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_path: str | Path, *, digits: int = 1) -> Path:
    """Train and write tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

    The result is a function of the texts, `vocab_size` and `digits`. If the texts give too few merges, reserved tokens
    fill the vocabulary up to exactly `vocab_size` ids. There is no normalisation: text survives unchanged.

    Args:
        vocab_size: number of ids, including the bytes and the family's special tokens.
        out_path: folder to write into; created if missing.
        digits: maximum number of digits in one token. The family has 1; a tiny model copies numbers more reliably in
            pairs.

    Returns:
        The folder.

    Raises:
        BadInput: `vocab_size` cannot hold the bytes and the special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise refusal("vocab_size", f"at least {MIN_VOCAB_SIZE}", str(vocab_size), "raise it")
    tokenizer = _untrained(digits)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPECIAL) - len(_CONTENT),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _CONTENT])
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|reserved_{n}|>", special=True, normalized=False) for n in range(missing)]
    )
    out = Path(out_path)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_settings(out)
    return out


def _untrained(digits: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN.replace("DIGITS", str(digits))), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_settings(out: Path) -> None:
    named = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "model_max_length": 131072,
        **named,
    }
    template = resources.files("sparring.render").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    # Older readers look for the template here.
    (out / "tokenizer_config.json").write_text(_json({**config, "chat_template": template}), encoding="utf-8")
    (out / "special_tokens_map.json").write_text(_json(named), encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
