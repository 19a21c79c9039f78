"""Encoding by `fastokens`: the ids are those of the `tokenizers` library, or it is not used."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from sparring.render.encoding import MUCH_TEXT, TextEncoder, proofs

ROOT = Path(__file__).parents[3]
WORDS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How published families of models split a text into words."""


def trained(words: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS[words]), "isolated")
    if words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")], trainer)
    return tokenizer


@pytest.fixture(scope="module", params=WORDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return trained(request.param)


@pytest.fixture(scope="module")
def quick(tokenizer: Tokenizer) -> TextEncoder:
    encoder = TextEncoder(tokenizer)
    assert encoder.quicken()
    return encoder


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


PIECES = st.sampled_from(
    ("'s", "'LL", "  ", "\n", "\r\n", "\t", "12", "345", "<|im_end|>", "x", "\u00c9", "\u4f60", "\u0301", "\U0001f642")
)


@settings(max_examples=300, deadline=None)
@given(text=st.lists(PIECES | st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=8)).map("".join))
def test_random_texts_have_equal_ids(tokenizer: Tokenizer, quick: TextEncoder, text: str) -> None:
    assert quick.encode(text) == plain(tokenizer, text)


def test_long_texts_have_the_same_ids(tokenizer: Tokenizer, quick: TextEncoder) -> None:
    """A million characters of Python: in one call, as long prompts are."""
    source = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "src/sparring/render").glob("*.py")))
    text = source * (1 + 1_000_000 // len(source))
    assert quick.encode(text) == plain(tokenizer, text)


def test_several_threads_encode_at_once(tokenizer: Tokenizer, quick: TextEncoder) -> None:
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "src/sparring/render").glob("*.py"))]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(quick.encode, texts * 4))
    assert found == [plain(tokenizer, text) for text in texts] * 4


def test_proofs_cover_every_token(tokenizer: Tokenizer) -> None:
    tried = {id for text in proofs(tokenizer) for id in plain(tokenizer, text)}
    assert len(tried) > 0.8 * tokenizer.get_vocab_size(), "others are halves of characters, or merge with neighbours"


def test_fastokens_loads_after_much_text_with_equal_ids() -> None:
    tokenizer = trained("qwen2")
    encoder = TextEncoder(tokenizer)
    rng = random.Random(1)
    texts = ["".join(rng.choices("ab c\n1é", k=1000)) for _ in range(3 * MUCH_TEXT // 1000)]
    assert [encoder.encode(text) for text in texts] == [plain(tokenizer, text) for text in texts]
    for thread in [thread for thread in threading.enumerate() if thread.name == "quicken"]:
        thread.join()
    assert encoder.quick
    assert [encoder.encode(text) for text in texts] == [plain(tokenizer, text) for text in texts]


def test_an_unsupported_tokenizer_keeps_the_slow_encoder() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = TextEncoder(tokenizer)
    assert not encoder.quicken()
    assert encoder.encode("a b c") == [0, 1, 2]


def test_added_tokens_with_spaces_have_equal_ids() -> None:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_of_all = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<unk>", *bytes_of_all], show_progress=False)
    tokenizer.train_from_iterator([f"word{n % 97} and {n % 13} more" for n in range(500)], trainer)
    encoder = TextEncoder(tokenizer)
    encoder.quicken()
    for text in ("word1  and é 你 more", " more", "▁", "a" * 5000):
        assert encoder.encode(text) == plain(tokenizer, text)


def test_a_forked_process_can_encode() -> None:
    tokenizer = trained("qwen2")
    encoder = TextEncoder(tokenizer)
    assert encoder.quicken()
    long = "one two three\n" * 40_000
    expected = encoder.encode(long)
    for _ in range(8):  # a thread of the encoder may hold a lock just then
        encoder.encode(long)
        child = os.fork()
        if not child:
            os._exit(int(encoder.encode(long) != expected or encoder.quick or encoder.quicken()))
        assert os.waitpid(child, 0)[1] == 0
    assert encoder.quick
