"""Token ids as text, from tokenizer.json alone."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from sparring.dashboard.token_text import load_pieces


def test_byte_level_pieces_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=300, special_tokens=["<|im_end|>"], initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(["hello hello\n world"] * 9, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = load_pieces(tmp_path / "tokenizer.json")
    assert "".join(pieces[i][0] for i in tokenizer.encode(" hello\n\tworld!").ids) == " hello\n\tworld!"
    assert pieces[tokenizer.token_to_id("<|im_end|>")] == ("<|im_end|>", "special")
    assert [pieces[i] for i in tokenizer.encode("é").ids] == [("‹c3›", "bytes"), ("‹a9›", "bytes")]
    assert len(pieces) == tokenizer.get_vocab_size()


def test_sentencepiece_style_and_unigram_lists(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    vocabulary = [["<unk>", 0.0], ["\u2581the", -1.0], ["<0x0A>", -2.0], ["<0xC3>", -2.0]]
    file.write_text(json.dumps({"model": {"type": "Unigram", "vocab": vocabulary}, "added_tokens": []}))
    assert load_pieces(file) == {0: ("<unk>", ""), 1: (" the", ""), 2: ("\n", ""), 3: ("‹c3›", "bytes")}
