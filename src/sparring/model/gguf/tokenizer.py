"""Conversion of a GGUF file's tokenizer to the files of a checkpoint folder.

transformers builds the tokenizer from the file's head: vocabulary, merges, added tokens, and a pre-tokenizer whose name
transformers knows. For any other name it silently splits text as GPT-2 does; such a name is handled here or refused,
since the model would read other ids than it was trained on.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, TokenizersBackend
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from sparring.errors import BadInput, boundary, refusal

AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
"""Names (`tokenizer.ggml.pre`) of pre-tokenizers that split as GPT-2 does (llama.cpp, llama-vocab.cpp)."""
DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")
"""Names of pre-tokenizers that isolate every digit and otherwise split as GPT-2 does (same source)."""
WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano", "tekken"),
)
"""Names of pre-tokenizers that keep a word of the vocabulary whole, whatever the merges say, and that begin a text with
bos unless the file disables it (same source)."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a reply (`tokenizer.ggml.*_token_id`)."""
NAMED = ("bos", *ENDS, "unknown", "padding")
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens (`tokenizer.ggml.token_type`) whose text is never split; CONTROL tokens are special."""
NEEDED = {"gpt2": ("tokenizer.ggml.pre", "tokenizer.ggml.merges"), "llama": ("tokenizer.ggml.scores",)}
"""Required fields by `tokenizer.ggml.model`: without them transformers and llama.cpp differ in splits, or fail."""
DO = "put the model's tokenizer.json beside the file"


def check_tokenizer(file: Path, fields: Mapping[str, Any], rows: int | None, other: Path | None) -> None:
    """Refuse (`BadInput`) a file without a tokenizer, in its head or as `other` (a tokenizer.json that replaces the
    file's), or whose tokenizer does not fit an embedding of `rows` rows."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None:
        if other is None:
            raise refusal(str(file), "a tokenizer in its head", "none", "put the model's tokenizer.json beside it")
        return
    remedy = "take another file, or put the model's tokenizer.json beside it"
    if rows is not None and len(tokens) > rows:
        raise refusal(str(file), f"at most {rows} tokens, the rows of the embedding", str(len(tokens)), remedy)
    for name in NAMED:
        id = fields.get(f"tokenizer.ggml.{name}_token_id", 0)
        if not isinstance(id, int) or not 0 <= id < len(tokens):
            raise refusal(str(file), f"a {name}_token_id below {len(tokens)}", str(id), remedy)
    if all(f"tokenizer.ggml.{name}_token_id" not in fields for name in ENDS):
        raise refusal(str(file), "the id of a token that ends replies (tokenizer.ggml.eos_token_id)", "none", remedy)
    if other is not None:
        return
    kind = fields.get("tokenizer.ggml.model")
    for key in NEEDED.get(str(kind), ()):
        if key not in fields and not (key.endswith("scores") and "tokenizer.ggml.merges" in fields):
            raise refusal(str(file), f"a {kind} tokenizer with {key}", "none", remedy)
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise refusal(str(file), "every token once", f"two of {twice!r}", remedy)
    kinds = fields.get("tokenizer.ggml.token_type", [])
    if len(kinds) != len(tokens):
        raise refusal(str(file), f"{len(tokens)} kinds of tokens (tokenizer.ggml.token_type)", str(len(kinds)), remedy)


def write_tokenizer(file: Path, fields: Mapping[str, Any], other: Path | None, out: Path, kind: str) -> None:
    """Write tokenizer.json, tokenizer_config.json, the chat template and generation_config.json of a GGUF file into
    `out`. The tokenizer.json `other` takes the place of the file's tokenizer; `kind` is transformers' `model_type`.
    Raises BadInput if the file's tokenizer or its pre-tokenizer is unknown."""
    if "tokenizer.ggml.tokens" in fields:
        with boundary(BadInput, str(file), "a tokenizer that the library reads", "put its tokenizer.json beside it"):
            _library_s(file, kind).save_pretrained(out)
        if other is None:
            _split(out / "tokenizer.json", fields, str(file))
            _added(out / "tokenizer.json", fields, str(file))
            _prefix(out / "tokenizer.json", fields)
        _templates(out, fields)
    if other is not None:
        shutil.copyfile(other, out / "tokenizer.json")
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", *ENDS)}
    ends = sorted({id for id in map(ids.get, ENDS) if id is not None})
    named = {"bos_token_id": ids["bos"], "eos_token_id": ends or None, "pad_token_id": ids["padding"]}
    text = json.dumps({key: value for key, value in named.items() if value is not None}, indent=2)
    (out / "generation_config.json").write_text(text + "\n", encoding="utf-8")


def _library_s(file: Path, kind: str) -> Any:
    """Return transformers' tokenizer of a file. If the kind of model has no tokenizer class of its own, the generic
    class is called directly, because transformers would first read all settings of the file, which takes seconds."""
    if kind in TOKENIZER_MAPPING_NAMES:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, tokenizer_type=kind)
    return TokenizersBackend.from_pretrained(file.parent, gguf_file=file.name)


def _split(file: Path, fields: Mapping[str, Any], where: str) -> None:
    """Correct the pre-tokenizer of a byte-level tokenizer whose name transformers does not know."""
    name = fields.get("tokenizer.ggml.pre")
    if name in WHOLE_WORDS:
        _change(file, lambda written: written["model"].update(ignore_merges=True))
    if name in WHOLE_WORDS and "tokenizer.ggml.add_bos_token" not in fields and "tokenizer.ggml.bos_token_id" in fields:
        _change(file.with_name("tokenizer_config.json"), lambda written: written.update(add_bos_token=True))
    splits = (*gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2)
    if fields.get("tokenizer.ggml.model") != "gpt2" or name in splits:
        return
    if name not in DIGIT_BY_DIGIT:
        raise refusal(where, "a tokenizer.ggml.pre that is known", repr(name), DO)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(file))


def _change(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    written = json.loads(file.read_text(encoding="utf-8"))
    change(written)
    file.write_text(json.dumps(written, ensure_ascii=False, indent=2), encoding="utf-8")


def _added(file: Path, fields: Mapping[str, Any], where: str) -> None:
    """Give the tokens of a byte-level vocabulary the spelling and the ids of the file; check the ids of any other
    vocabulary.

    transformers spells tokens with letters beyond the byte alphabet (`<｜User｜>`, two blanks) in that alphabet, and
    then omits them from the added tokens, or adds them again after the last id.
    """
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    written = json.loads(file.read_text(encoding="utf-8"))
    added = {token["id"]: token for token in written["added_tokens"]}
    if fields.get("tokenizer.ggml.model") == "gpt2":
        written["model"]["vocab"] = {token: id for id, token in enumerate(tokens)}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = {id: token for id, token in added.items() if tokens[id : id + 1] == [token["content"]]}
        for id, (content, kind) in enumerate(zip(tokens, kinds, strict=True)):
            if kind in (CONTROL, USER_DEFINED):
                added.setdefault(id, {"id": id, "content": content, **plain, "special": kind == CONTROL})
        written["added_tokens"] = [added[id] for id in sorted(added)]
        file.write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")
    with boundary(BadInput, where, "a tokenizer that can be made", DO):
        ids = Tokenizer.from_file(str(file)).get_vocab()
    wrong = [token for id, token in enumerate(tokens) if kinds[id] == CONTROL and ids.get(token) != id]
    wrong += [token for token, id in ids.items() if id >= len(tokens)]
    if wrong:
        raise refusal(where, "a tokenizer that gives tokens the ids of the file", f"another for {wrong[0]!r}", DO)


def _prefix(file: Path, fields: Mapping[str, Any]) -> None:
    """Remove the blank that transformers puts before a text, if a SentencePiece file disables it."""
    if fields.get("tokenizer.ggml.model") != "llama" or fields.get("tokenizer.ggml.add_space_prefix", True):
        return
    written = json.loads(file.read_text(encoding="utf-8"))
    splitter, decoder = written["pre_tokenizer"] or {}, written["decoder"] or {}
    if splitter.get("type") == "Metaspace":
        splitter["prepend_scheme"] = "never"
    if decoder.get("type") == "Sequence":
        decoder["decoders"] = [part for part in decoder["decoders"] if part["type"] != "Strip"]
    file.write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")


def _templates(out: Path, fields: Mapping[str, Any]) -> None:
    """Write the file's named chat templates (`tokenizer.chat_template.NAME`, for example one for tools) with its
    default template."""
    start = "tokenizer.chat_template."
    named = {key.removeprefix(start): text for key, text in fields.items() if key.startswith(start)}
    if not named:
        return
    if (own := fields.get("tokenizer.chat_template")) is not None:
        named = {**named, "default": own}
    (out / "chat_template.jinja").unlink(missing_ok=True)
    shutil.rmtree(out / "additional_chat_templates", ignore_errors=True)
    templates = [{"name": name, "template": text} for name, text in sorted(named.items())]
    _change(out / "tokenizer_config.json", lambda written: written.update(chat_template=templates))
