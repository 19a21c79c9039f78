"""Token ids as text, from tokenizer.json alone."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from sparring.dashboard.token_text import load_pieces


def test_byte_level_pieces_join_to_the_text(sample_run: Path) -> None:
    file = sample_run / "init/model/tokenizer.json"
    tokenizer, pieces = Tokenizer.from_file(str(file)), load_pieces(file)
    assert "".join(pieces[i][0] for i in tokenizer.encode(" hello\n\tworld!").ids) == " hello\n\tworld!"
    assert pieces[tokenizer.token_to_id("<|im_end|>")] == ("<|im_end|>", "special")
    assert [pieces[i] for i in tokenizer.encode("é").ids] == [("‹c3›", "bytes"), ("‹a9›", "bytes")]
    assert len(pieces) == tokenizer.get_vocab_size()


def test_sentencepiece_style_and_unigram_lists(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    vocabulary = [["<unk>", 0.0], ["\u2581the", -1.0], ["<0x0A>", -2.0], ["<0xC3>", -2.0]]
    file.write_text(json.dumps({"model": {"type": "Unigram", "vocab": vocabulary}, "added_tokens": []}))
    assert load_pieces(file) == {0: ("<unk>", ""), 1: (" the", ""), 2: ("\n", ""), 3: ("‹c3›", "bytes")}
