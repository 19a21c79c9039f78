"""Every number of rows from 1 to 300, or those beside the ends of tiles, and every number of threads from 1 to 4, at the
shapes that are trained and measured."""

from __future__ import annotations

from array import array

import pytest
import torch

from sparring.kernels import ops
from sparring.kernels.compiled.library import COMPILED
from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.model.steps.compiled import DecoderStep
from sparring.model.steps.operations import OperationStep
from sparring.model.steps.rows import Slots, StepRows
from sparring.recipe.load import load as load_recipe
from sparring.testing.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("kernel_path")

MOST = 300
THREADS = (1, 2, 3, 4)
PAGE, PAGES_PER_TABLE = 16, 3
B = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
LENGTHS = [1, 2, 3, 8, 1, 15, 33, 64, 7, 40, 90, 36]


def quickstart():
    """The shape of the quickstart's policy; its tokenizer, which decides the vocabulary, is trained in the run."""
    init = load_recipe("recipes/quickstart.toml").models["policy"].init
    return {
        "hidden_size": init.hidden_size,
        "head_dim": init.head_dim,
        "intermediate_size": init.intermediate_size,
        "num_attention_heads": init.num_heads,
        "num_key_value_heads": init.num_kv_heads,
        "vocab_size": 500,
    }


SHAPES = [
    pytest.param(quickstart, id="quickstart"),
    pytest.param(lambda: {**B, "vocab_size": 32768}, id="B", marks=pytest.mark.slow),
]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES)
def model(request, dtype, tmp_path):
    shape = request.param()
    path = tiny_model("qwen3", tmp_path / "model", num_hidden_layers=1, **shape)
    return load(path, dtype=dtype)


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sweep(model):
    """Threads, and counts of rows under them; of a large model, those beside the ends of tiles."""
    few = [count for count in range(1, MOST + 1) if count < 9 or count % 32 in (0, 1, 31) or count == MOST]
    for threads in THREADS:
        torch.set_num_threads(threads)
        yield from ((threads, count) for count in (few if model.vocab_size > 4096 else range(1, MOST + 1)))


@torch.inference_mode()
def test_rows_of_packed_sequences(model):
    assert sum(LENGTHS) == MOST
    tokens = torch.randint(model.vocab_size, (MOST,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])

    def logits(count):
        lengths, left = [], count
        while left:
            lengths.append(min(left, LENGTHS[len(lengths)]))
            left -= lengths[-1]
        return model.logits(model.hidden(tokens[:count], positions[:count], Packed.of(lengths)))

    torch.set_num_threads(1)
    alone = logits(MOST)
    assert [place for place in sweep(model) if not torch.equal(logits(place[1]), alone[: place[1]])] == []


class Decode:
    """`MOST` sequences over pages, of 1 to 40 tokens; each step adds none: it computes the last token of some of them
    again."""

    def __init__(self, model, kind):
        pages = ops.KvPages(model.kv_heads, num_pages=MOST * PAGES_PER_TABLE, page_size=PAGE, dtype=model.dtype)
        slots = Slots.of(MOST, PAGES_PER_TABLE, model.vocab_size)
        slots.tables[:] = torch.arange(MOST * PAGES_PER_TABLE).view(MOST, PAGES_PER_TABLE)
        slots.seeds[:] = range(MOST)
        slots.top_k[::7] = 50
        lean = kind is DecoderStep
        self.step = DecoderStep(model, pages, slots) if lean else OperationStep(model, pages, slots)
        self.lengths, generator = [1 + slot % 40 for slot in range(MOST)], torch.Generator().manual_seed(2)
        self.tokens = [torch.randint(model.vocab_size, (n,), generator=generator).tolist() for n in self.lengths]
        self._sample(range(MOST), [length for length in self.lengths])

    def last_tokens(self, slots):
        """What each of `slots` samples behind its last token."""
        return self._sample(slots, [1] * len(slots))

    def _sample(self, slots, counts):
        rows = StepRows(
            slots=array("i", slots),
            cu_rows=array("i", [0, *torch.tensor(counts).cumsum(0).tolist()]),
            lengths=array("i", [self.lengths[slot] for slot in slots]),
            tokens=array("q", [t for slot, n in zip(slots, counts, strict=True) for t in self.tokens[slot][-n:]]),
            samples=array("B", [1] * len(slots)),
            entered=array("B", [0] * len(slots)),
            steps=1,
            interrupt=array("i", [0]),
        )
        found = self.step(rows)
        return list(zip(found.tokens, found.logprobs, strict=True))


@pytest.mark.full
@torch.inference_mode()
@pytest.mark.kernel_paths("best", *COMPILED)
@pytest.mark.parametrize("kind", [OperationStep, pytest.param(DecoderStep, marks=pytest.mark.kernel_paths(*COMPILED))])
def test_rows_of_generating_sequences(model, kind):
    torch.set_num_threads(1)
    decode = Decode(model, kind)
    expected = [sampled for slot in range(MOST) for sampled in decode.last_tokens([slot])]
    assert len(set(map(str, expected))) > MOST // 2
    wrong = []
    for place in sweep(model):
        slots = range(MOST - place[1], MOST) if place[1] % 2 else range(place[1])
        wrong += [place] if decode.last_tokens(slots) != expected[slots.start : slots.stop] else []
    assert wrong == []
