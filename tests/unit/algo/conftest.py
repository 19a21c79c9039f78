"""Two renderers of the same chat format with tokenizers of their own."""

import pytest

from sparring.render.load import load_renderer
from sparring.render.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer

TEXTS = ["the answer is five", "the answer is not five", "What is two plus three? add two to three"] * 3


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Checkpoint folders with a tokenizer that has merges, and with one that has none."""
    merged = train_tokenizer(TEXTS, MIN_VOCAB_SIZE + 60, tmp_path_factory.mktemp("merged"))
    return merged, train_tokenizer([], MIN_VOCAB_SIZE, tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def renderers(folders):
    """Of each of them."""
    return tuple(load_renderer(folder) for folder in folders)
