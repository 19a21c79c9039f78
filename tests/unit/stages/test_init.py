"""A model that begins from nothing: what its config names of the tokenizer."""

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from sparring.stages.init import ends_of


@pytest.mark.parametrize(
    "tokens, ends",
    [
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [2, 0]),
        (["<|im_end|>"], [0]),
        (["<|begin_of_text|>", "<|eot_id|>"], None),
    ],
)
def test_ends_are_those_that_the_tokenizer_has(tokens: Sequence[str], ends: list[int] | None) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.add_special_tokens([AddedToken(token) for token in tokens])
    assert ends_of(tokenizer) == ends
