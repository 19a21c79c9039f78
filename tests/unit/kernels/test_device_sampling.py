"""What draws on a device, run on the CPU: the draws of `exact-torch`, row by row the same bits, kept sets included."""

import pytest
import torch

from sparring.kernels.device import sampling as device_sampling
from sparring.kernels.device.sampling import draw, kept_of, log_statistics, running_sum, words_of
from sparring.kernels.kept import ids_of, no_masks
from sparring.kernels.torch.path import TorchPath, uniform

ROWS, VOCABULARY = 60, 3000


def settings(count):
    """Temperature, top_k, top_p, min_p, seeds, positions, limited; all kinds of truncation, alone and together."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(count)
    return (
        torch.tensor([1.0, 0.7, 0.0, 1.3])[kinds % 4],
        torch.tensor([0, 50, 0, 0, 7])[kinds % 5],
        torch.tensor([1.0, 1.0, 0.9])[kinds % 3],
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0])[kinds % 7],
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
        torch.randint(0, 2**40, (count,), generator=generator),
        (kinds % 11 == 3).to(torch.uint8),
    )


def logits_of(limited):
    logits = 3 * torch.randn(len(limited), VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[:, 11] = logits[:, 5]  # equal ones: lowest id first
    logits[limited.bool(), 100:] = -torch.inf
    return logits


def test_the_draws_are_those_of_plain_torch():
    requests = settings(ROWS)
    logits = logits_of(requests[-1])
    masks = no_masks(ROWS, VOCABULARY)
    expected, expected_logprobs = TorchPath().sample(logits, requests, masks)
    tokens, logprobs, (truncated, kept) = draw(logits, requests, truncating=True)
    assert tokens.tolist() == expected.tolist()
    assert (logprobs - expected_logprobs).abs().max() < 1e-5
    assert ids_of(words_of(kept & truncated.unsqueeze(1))) == ids_of(masks)
    assert 20 < sum(map(bool, ids_of(masks))) < ROWS


def test_without_truncation_the_draws_are_the_same():
    temperature, *_, seeds, positions, _ = settings(ROWS)
    none = torch.zeros(ROWS)
    requests = (temperature, none.long(), none + 1, none, seeds, positions, none.to(torch.uint8))
    logits = logits_of(none)
    expected, _ = TorchPath().sample(logits, requests, None)
    assert draw(logits, requests, truncating=False)[0].tolist() == expected.tolist()
    assert draw(logits, requests, truncating=True)[0].tolist() == expected.tolist()


def test_a_row_has_the_same_bits_among_any_neighbours():
    requests = settings(ROWS)
    logits = logits_of(requests[-1])
    tokens, logprobs, _ = draw(logits, requests, truncating=True)
    for begin, end in ((0, 1), (3, 20), (41, 60)):
        part = draw(logits[begin:end], tuple(r[begin:end] for r in requests), truncating=True)
        assert torch.equal(part[0], tokens[begin:end]) and torch.equal(part[1], logprobs[begin:end])


def test_a_recorded_set_gives_the_log_probability_of_the_draw_to_the_bit():
    requests = settings(ROWS)
    logits = logits_of(requests[-1])
    tokens, logprobs, (truncated, kept) = draw(logits, requests, truncating=True)
    sets = [
        row.nonzero()[:, 0] if cut else torch.empty(0, dtype=torch.int64)
        for row, cut in zip(kept, truncated, strict=True)
    ]
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    found, wrong = kept_of((offsets, torch.cat(sets).to(torch.int32)), logits.shape)
    assert not wrong.any()
    again, entropy, _, _ = log_statistics(logits, tokens, requests[0], found)
    assert torch.equal(again, logprobs)
    (expected, expected_entropy, _, _), bad = TorchPath().token_logprobs(
        logits, tokens, requests[0], (offsets, torch.cat(sets))
    )
    assert bad == -1
    assert (again - expected).abs().max() < 1e-5 and (entropy - expected_entropy).abs().max() < 1e-4


@pytest.mark.parametrize("ids", [[3, 3], [5, 4], [-1, 2], [2, VOCABULARY]])
def test_ids_that_do_not_ascend_within_the_vocabulary_are_found(ids):
    offsets, both = torch.tensor([0, 2, 4]), torch.tensor([1, 2, *ids], dtype=torch.int32)
    _, wrong = kept_of((offsets, both), torch.Size((2, VOCABULARY)))
    assert wrong.tolist() == [False, True]


def test_the_random_numbers_are_philox():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789123456789])
    positions = torch.tensor([0, 7, 2**32 + 5, 1, 2**31, 99])
    expected = [uniform(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert device_sampling.uniform(seeds, positions).tolist() == expected


@pytest.mark.parametrize("width", [1, 2, 1000, 1024, 1025, 5000])
def test_running_sums_are_sums(width):
    x = torch.rand(3, width, dtype=torch.float64)
    assert torch.allclose(running_sum(x), x.cumsum(1), rtol=1e-13)
