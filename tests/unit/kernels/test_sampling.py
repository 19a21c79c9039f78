"""What is drawn, from what, and with which log-probability."""

from __future__ import annotations

import pytest
import torch
from refusals import refused_at

from sparring.errors import BadInput
from sparring.kernels import ops
from sparring.kernels.torch.path import uniform
from sparring.kernels.truncation import ids_of, split_rows

pytestmark = pytest.mark.usefixtures("path")


def draw(
    logits: torch.Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """`count` draws from one row of logits, seeds 5, 6, ...; and the ids that each was drawn from, none for all."""
    tokens, logprobs, masks = ops.sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.arange(5, 5 + count),
        torch.full((count,), 3),
    )
    sets = [b""] * count if masks is None else ids_of(masks)
    return (
        tokens,
        logprobs,
        [torch.frombuffer(bytearray(ids), dtype=torch.int32).tolist() if ids else [] for ids in sets],
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
    tokens, _, kept = draw(logits, 50)
    assert kept == [[]] * 50
    assert tokens.tolist() == [int(uniform(5 + i, 3) * 4096) for i in range(50)]


def test_large_seeds_and_positions_count_in_full() -> None:
    seeds = torch.tensor([2**63 + 5, 5, 5 + 2**32], dtype=torch.uint64)
    row, one, none = torch.zeros(3, 4096), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    tokens, _, masks = ops.sample(row, one, none, one, none, seeds, torch.tensor([2**33, 2**33, 2**33]))
    assert tokens.tolist() == [int(uniform(seed, 2**33) * 4096) for seed in (2**63 + 5, 5, 5 + 2**32)]
    assert len(set(tokens.tolist())) == 3 and masks is None


@pytest.mark.parametrize(("vocabulary", "temperature"), [(40, 1.0), (40, 0.6), (1500, 1.3)])
def test_frequencies_are_those_of_the_softmax(vocabulary: int, temperature: float) -> None:
    logits = logits_of(vocabulary)
    probabilities = torch.softmax(logits[0].double() / temperature, 0)
    tokens, *_ = draw(logits, 8000, temperature=temperature)
    freedom = vocabulary - 1
    assert chi_square(tokens, probabilities) < freedom + 4.5 * (2 * freedom) ** 0.5
    assert chi_square(tokens, probabilities.roll(1)) > freedom + 20 * (2 * freedom) ** 0.5  # the test can fail


@pytest.mark.parametrize("vocabulary", [7, 1024, 5000])
def test_untruncated_logprob_is_token_logprobs_to_the_bit(vocabulary: int) -> None:
    logits = logits_of(vocabulary, rows=80)
    temperature = torch.linspace(0.2, 2.0, 80)
    temperature[::9] = 0
    top_k = torch.where(torch.arange(80) % 2 == 0, 0, vocabulary + 3)
    one, none, places = torch.ones(80), torch.zeros(80), torch.arange(80)
    tokens, logprobs, masks = ops.sample(logits, temperature, top_k, one, none, places, places)
    assert masks is not None and not masks.any()
    assert torch.equal(logprobs, ops.token_logprobs(logits, tokens, temperature)[0])


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    tokens, logprobs, kept = draw(logits, 3, temperature=0.0, top_k=2)
    assert kept == [[]] * 3
    assert tokens.tolist() == [1, 1, 1]
    assert torch.allclose(logprobs, torch.log_softmax(logits, 1)[0, 1].expand(3))


def kept_by_definition(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Sorted in Python, with probabilities in float64."""
    count = len(logits)
    weights = torch.softmax(logits.double() / temperature, 0)
    order = sorted(range(count), key=lambda i: (-float(logits[i]), i))[: top_k or count]
    reached = (weights[order].cumsum(0) >= top_p * weights[order].sum()).nonzero()
    order = order[: int(reached[0]) + 1] if top_p < 1 else order
    return sorted(i for i in order if weights[i] >= min_p * weights.max())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [0, 1, 10])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_truncation_keeps_exactly_the_defined_set(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(60)
    wanted = kept_by_definition(logits[0], temperature, top_k, top_p, min_p)
    weights = torch.softmax(logits[0, wanted].double() / temperature, 0)
    tokens, logprobs, kept = draw(logits, 300, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    whole = top_k == 0 and top_p == 1.0 and min_p == 0.0
    assert kept == [[] if whole else wanted] * 300
    assert set(tokens.tolist()) <= set(wanted)
    assert {t for t, w in zip(wanted, weights.tolist(), strict=True) if w > 0.05} <= set(tokens.tolist())
    expected = torch.log(weights)[[wanted.index(t) for t in tokens.tolist()]]
    assert torch.allclose(logprobs.double(), expected, atol=2e-6)


@pytest.mark.parametrize("order", ["any", "ascending", "descending", "few values"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (200, 0.9, 0.0), (0, 0.95, 0.001), (0, 0.3, 0.0), (1999, 0.99, 0.01)]
)
def test_a_large_vocabulary_in_any_order(order: str, top_k: int, top_p: float, min_p: float) -> None:
    """The best are found without sorting all: their order, and equals among them, must not matter."""
    logits = logits_of(3000)
    if order == "few values":
        logits = logits.mul(2).round()
    elif order != "any":
        logits = logits.sort(descending=order == "descending").values
    _, _, kept = draw(logits, 2, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept[0] == kept[1] == kept_by_definition(logits[0], 1.0, top_k, top_p, min_p)


def test_truncated_draws_have_the_frequencies_of_the_kept_tokens() -> None:
    logits = logits_of(1500)
    wanted = kept_by_definition(logits[0], 1.0, 400, 0.7, 0.02)
    probabilities = torch.zeros(1500, dtype=torch.float64)
    probabilities[wanted] = torch.softmax(logits[0, wanted].double(), 0)
    tokens, _, kept = draw(logits, 8000, top_k=400, top_p=0.7, min_p=0.02)
    assert kept[0] == wanted and 20 < len(wanted) < 400
    freedom = len(wanted) - 1
    assert (
        chi_square(tokens[:, None].eq(torch.tensor(wanted)).int().argmax(1), probabilities[wanted])
        < freedom + 4.5 * (2 * freedom) ** 0.5
    )


@pytest.mark.parametrize("vocabulary", [5, 64, 65, 1024, 4096])
def test_a_truncated_logprob_is_token_logprobs_over_the_kept_ids_to_the_bit(vocabulary: int) -> None:
    logits, count = logits_of(vocabulary, rows=90), 90
    columns = {
        "temperature": (1.0, 0.7, 0.0, 1.3),
        "top_k": (0, 0, 0, 50, 3),
        "top_p": (1.0, 0.9, 0.5),
        "min_p": (0.0, 0.05),
    }
    requests = [torch.tensor([values[n % len(values)] for n in range(count)]) for values in columns.values()]
    tokens, logprobs, masks = ops.sample(logits, *requests, torch.arange(count), torch.arange(count))
    sets = ids_of(masks)
    kept = (
        torch.tensor([0, *(len(ids) // 4 for ids in sets)]).cumsum(0),
        torch.frombuffer(bytearray(b"".join(sets)), dtype=torch.int32),
    )
    leaf = logits.clone().requires_grad_()
    assert torch.equal(ops.token_logprobs(logits, tokens, requests[0], kept)[0], logprobs)
    assert torch.equal(ops.token_logprobs(leaf, tokens, requests[0], kept)[0], logprobs)
    for chunk, part in zip(split_rows(kept, count, 32), range(0, count, 32), strict=True):
        rows = slice(part, part + 32)
        assert torch.equal(ops.token_logprobs(logits[rows], tokens[rows], requests[0][rows], chunk)[0], logprobs[rows])
    assert not torch.equal(ops.token_logprobs(logits, tokens, requests[0])[0], logprobs), (
        "without the kept sets it is another"
    )


def test_gradients_over_kept_ids_are_those_of_the_narrow_softmax() -> None:
    logits = logits_of(200, rows=4).requires_grad_()
    sets = [[3, 7, 100, 199], [], [5], list(range(0, 200, 3))]
    targets, heat = torch.tensor([100, 6, 5, 9]), torch.tensor([1.0, 0.7, 1.0, 1.5])
    kept = (
        torch.tensor([0, *map(len, sets)]).cumsum(0),
        torch.tensor([i for ids in sets for i in ids], dtype=torch.int32),
    )
    logprob, entropy = ops.token_logprobs(logits, targets, heat, kept)
    exact = logits.detach().double().requires_grad_()
    expected = []
    for n, ids in enumerate(sets):
        ids = ids or list(range(200))
        log_p = torch.log_softmax(exact[n, ids] / heat[n], 0)
        expected.append(torch.stack((log_p[ids.index(int(targets[n]))], -(log_p.exp() * log_p).sum())))
    wanted = torch.stack(expected)
    assert torch.allclose(torch.stack((logprob, entropy), 1).double(), wanted, atol=3e-6)
    slope = torch.tensor([[1.0, 0.5], [-2.0, 1.0], [1.0, 1.0], [0.3, -1.0]])
    [grad] = torch.autograd.grad((torch.stack((logprob, entropy), 1) * slope).sum(), logits)
    [exact_grad] = torch.autograd.grad((wanted * slope).sum(), exact)
    assert torch.allclose(grad.double(), exact_grad, atol=2e-6)
    assert grad[0].count_nonzero() <= 4 and not grad[2].any()


@pytest.mark.parametrize("ids", [[3, 4], [7, 5, 2], [2, 5, 5], [5, 300], [-1, 5]])
def test_kept_ids_that_cannot_be_are_refused(ids: list[int]) -> None:
    kept = (torch.tensor([0, len(ids)]), torch.tensor(ids, dtype=torch.int32))
    with refused_at("target of row 0", "one of its kept ids"):
        ops.token_logprobs(torch.zeros(1, 300), torch.tensor([5]), torch.ones(1), kept)
    with refused_at("kept", "offsets"):
        ops.token_logprobs(torch.zeros(1, 300), torch.tensor([5]), torch.ones(1), (torch.tensor([0, 9]), kept[1]))


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_row_that_is_no_numbers_does_no_harm(limits: dict[str, float]) -> None:
    tokens, logprobs, _ = draw(torch.full((1, 70), float("nan")), 3, **limits)
    assert tokens.tolist() == [0, 0, 0] and logprobs.isnan().all()


def test_ties_are_kept_lowest_id_first() -> None:
    logits = torch.zeros(1, 600)
    tokens, logprobs, _ = draw(logits, 500, top_k=5)
    assert set(tokens.tolist()) == {0, 1, 2, 3, 4}
    assert torch.allclose(logprobs, torch.full((500,), -(torch.tensor(5.0).log().item())))
    tokens, *_ = draw(logits, 1500, top_p=0.5)
    assert set(tokens.tolist()) <= set(range(300))
    assert max(tokens.tolist()) > 280


def test_a_logit_of_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((1, 64), float("-inf"))
    logits[0, [3, 40]] = torch.tensor([0.0, 1.0])
    tokens, logprobs, _ = draw(logits, 300)
    assert set(tokens.tolist()) == {3, 40}
    assert draw(logits, 1, top_k=5)[2] == [[3, 40]], "and never kept"
    assert logprobs.isfinite().all()
    logprob, entropy = ops.token_logprobs(logits, torch.tensor([40]), torch.ones(1))
    assert torch.allclose(logprob.exp() + torch.tensor([0.26894142]), torch.ones(1))
    assert torch.allclose(entropy, torch.tensor([0.5822033]))


def test_allowed_tokens_are_recorded_as_a_kept_set() -> None:
    """As it is where something else truncates too; the log-probability is that of the kept ids, to the bit."""
    count, logits = 60, logits_of(300, rows=60)
    limited = torch.arange(count) % 3 > 0
    logits[limited.unsqueeze(1) & (torch.arange(300) % 7 > 1)] = -torch.inf
    top_k, one, none = torch.arange(count) % 2 * 5, torch.ones(count), torch.zeros(count)
    tokens, logprobs, masks = ops.sample(
        logits, one, top_k, one, none, torch.arange(count), torch.arange(count), limited
    )
    sets = [torch.frombuffer(bytearray(ids), dtype=torch.int32).tolist() if ids else [] for ids in ids_of(masks)]
    may = [i for i in range(300) if i % 7 <= 1]
    assert all(ids == may for n, ids in enumerate(sets) if limited[n] and not top_k[n])
    assert all(len(ids) == 5 and (not limited[n] or set(ids) <= set(may)) for n, ids in enumerate(sets) if top_k[n])
    assert all(ids == [] for n, ids in enumerate(sets) if not limited[n] and not top_k[n])
    kept = (
        torch.tensor([0, *map(len, sets)]).cumsum(0),
        torch.tensor([i for ids in sets for i in ids], dtype=torch.int32),
    )
    assert torch.equal(ops.token_logprobs(logits.where(logits.isfinite(), 9.0), tokens, one, kept)[0], logprobs)


def test_bad_input_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(BadInput, match="target of row 0"):
        ops.token_logprobs(torch.zeros(1, 5), torch.tensor([5]), one)
    with pytest.raises(BadInput, match="float32"):
        ops.token_logprobs(torch.zeros(1, 5, dtype=torch.float64), torch.tensor([0]), one)
    with pytest.raises(BadInput, match="one value for each row"):
        ops.sample(torch.zeros(2, 5), one, one, one, one, one.long(), one.long())
    with pytest.raises(BadInput, match="one value for each row"):
        ops.sample(torch.zeros(1, 5), one, one, one, one, one.long(), one.long(), torch.ones(2))
