"""What is drawn, from what, and with which log-probability."""

from __future__ import annotations

import pytest
import torch

from sparring.errors import BadInput
from sparring.model.kernels import ops
from sparring.model.kernels.torch_path import uniform

pytestmark = pytest.mark.usefixtures("path")


def draw(
    logits: torch.Tensor, count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` draws from one row of logits, seeds 5, 6, ..."""
    return ops.sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.arange(5, 5 + count),
        torch.full((count,), 3),
    )


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * len(tokens)
    return float(((torch.bincount(tokens, minlength=len(expected)) - expected) ** 2 / expected).sum())


def logits_of(vocabulary: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 1.5


def test_philox_is_the_published_generator() -> None:
    """Known answers of Random123 (Salmon et al. 2011), philox4x32-10: first word for key 0, counter 0."""
    assert int(uniform(0, 0) * 2**24) == 0x6627E8D5 >> 8


def test_both_paths_draw_with_the_same_uniform_number() -> None:
    logits = torch.zeros(1, 4096)
    tokens, _ = draw(logits, 50)
    assert tokens.tolist() == [int(uniform(5 + i, 3) * 4096) for i in range(50)]


def test_large_seeds_and_positions_count_in_full() -> None:
    seeds = torch.tensor([2**63 + 5, 5, 5 + 2**32], dtype=torch.uint64)
    row, one, none = torch.zeros(3, 4096), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    tokens, _ = ops.sample(row, one, none, one, seeds, torch.tensor([2**33, 2**33, 2**33]))
    assert tokens.tolist() == [int(uniform(seed, 2**33) * 4096) for seed in (2**63 + 5, 5, 5 + 2**32)]
    assert len(set(tokens.tolist())) == 3


@pytest.mark.parametrize(("vocabulary", "temperature"), [(40, 1.0), (40, 0.6), (1500, 1.3)])
def test_frequencies_are_those_of_the_softmax(vocabulary: int, temperature: float) -> None:
    logits = logits_of(vocabulary)
    probabilities = torch.softmax(logits[0].double() / temperature, 0)
    tokens, _ = draw(logits, 8000, temperature=temperature)
    freedom = vocabulary - 1
    assert chi_square(tokens, probabilities) < freedom + 4.5 * (2 * freedom) ** 0.5
    assert chi_square(tokens, probabilities.roll(1)) > freedom + 20 * (2 * freedom) ** 0.5  # the test can fail


@pytest.mark.parametrize("vocabulary", [7, 1024, 5000])
def test_untruncated_logprob_is_token_logprobs_to_the_bit(vocabulary: int) -> None:
    logits = logits_of(vocabulary, rows=80)
    temperature = torch.linspace(0.2, 2.0, 80)
    temperature[::9] = 0
    top_k = torch.where(torch.arange(80) % 2 == 0, 0, vocabulary + 3)
    tokens, logprobs = ops.sample(logits, temperature, top_k, torch.ones(80), torch.arange(80), torch.arange(80))
    assert torch.equal(logprobs, ops.token_logprobs(logits, tokens, temperature)[0])


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    tokens, logprobs = draw(logits, 3, temperature=0.0)
    assert tokens.tolist() == [1, 1, 1]
    assert torch.allclose(logprobs, torch.log_softmax(logits, 1)[0, 1].expand(3))


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (10, 0.7), (1, 1.0), (0, 1e-6), (5, 0.999)])
def test_truncation_keeps_exactly_the_defined_set(top_k: int, top_p: float) -> None:
    logits = logits_of(60)
    order = sorted(range(60), key=lambda i: (-float(logits[0, i]), i))[: top_k or 60]
    weights = torch.softmax(logits[0].double(), 0)[order]
    reached = (weights.cumsum(0) >= top_p * weights.sum()).nonzero()
    count = int(reached[0]) + 1 if top_p < 1 else len(order)
    kept, weights = order[:count], weights[:count] / weights[:count].sum()
    tokens, logprobs = draw(logits, 2000, top_k=top_k, top_p=top_p)
    assert set(tokens.tolist()) <= set(kept)
    assert {t for t, w in zip(kept, weights.tolist(), strict=True) if w > 0.01} <= set(tokens.tolist())
    expected = torch.log(weights)[[kept.index(t) for t in tokens.tolist()]]
    assert torch.allclose(logprobs.double(), expected, atol=2e-6)


def test_ties_are_kept_lowest_id_first() -> None:
    logits = torch.zeros(1, 600)
    tokens, logprobs = draw(logits, 500, top_k=5)
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}
    assert torch.allclose(logprobs, torch.full((500,), -(torch.tensor(5.0).log().item())))
    tokens, _ = draw(logits, 1500, top_p=0.5)
    assert set(tokens.tolist()) <= set(range(300))
    assert max(tokens.tolist()) > 280


def test_a_logit_of_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((1, 64), float("-inf"))
    logits[0, [3, 40]] = torch.tensor([0.0, 1.0])
    tokens, logprobs = draw(logits, 300)
    assert set(tokens.tolist()) == {3, 40}
    assert logprobs.isfinite().all()
    logprob, entropy = ops.token_logprobs(logits, torch.tensor([40]), torch.ones(1))
    assert torch.allclose(logprob.exp() + torch.tensor([0.26894142]), torch.ones(1))
    assert torch.allclose(entropy, torch.tensor([0.5822033]))


def test_bad_input_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(BadInput, match="target of row 0"):
        ops.token_logprobs(torch.zeros(1, 5), torch.tensor([5]), one)
    with pytest.raises(BadInput, match="float32"):
        ops.token_logprobs(torch.zeros(1, 5, dtype=torch.float64), torch.tensor([0]), one)
    with pytest.raises(BadInput, match="one value for each row"):
        ops.sample(torch.zeros(2, 5), one, one, one, one.long(), one.long())
