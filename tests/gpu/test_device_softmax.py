"""Softmax over the vocabulary and draws on the device path: the values and the draws of `exact-torch`, and the bits of
a row whatever stands beside it and wherever it lies in memory."""

import pytest
import torch

from sparring.kernels.device.path import DevicePath
from sparring.kernels.torch.path import TorchPath, uniform
from sparring.kernels.truncation import ids_of, no_masks

# numpy warns of the infinite and undefined numbers of padding rows, which a device computes in silence
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ROWS = 60
WIDTHS = [37, 3000, 4096, 9001]
"""Less than a part, one part, exactly one, and three with a rest."""


def settings(count, device):
    """Temperature, top_k, top_p, min_p, seeds, positions, limited; all kinds of truncation, alone and together."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(count)
    requests = (
        torch.tensor([1.0, 0.7, 0.0, 1.3])[kinds % 4],
        torch.tensor([0, 50, 0, 0, 7])[kinds % 5],
        torch.tensor([1.0, 1.0, 0.9])[kinds % 3],
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0])[kinds % 7],
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
        torch.randint(0, 2**40, (count,), generator=generator),
        (kinds % 11 == 3).to(torch.uint8),
    )
    return tuple(part.to(device) for part in requests)


def untruncated(requests):
    temperature, *_, seeds, positions, _ = requests
    none = torch.zeros_like(temperature)
    return temperature, none.long(), none + 1, none, seeds, positions, none.to(torch.uint8)


def logits_of(limited, width):
    logits = 3 * torch.randn(len(limited), width, generator=torch.Generator().manual_seed(1))
    logits[:, 11] = logits[:, 5]  # equal ones: lowest id first
    logits[limited.cpu().bool(), 30:] = -torch.inf
    return logits.to(limited.device)


def sampled(path, logits, requests, *, truncating=True):
    masks = no_masks(*logits.shape) if truncating else None
    tokens, logprobs = path.sample(logits, requests, masks)
    return tokens, logprobs, ids_of(masks) if truncating else None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("truncating", [True, False])
def test_the_draws_are_those_of_plain_torch(device, width, truncating):
    requests = settings(ROWS, device)
    if not truncating:
        requests = untruncated(requests)
    logits = logits_of(requests[-1], width)
    expected = sampled(TorchPath(), logits.cpu(), tuple(part.cpu() for part in requests), truncating=truncating)
    tokens, logprobs, kept = sampled(DevicePath(), logits, requests, truncating=truncating)
    assert tokens.tolist() == expected[0].tolist()
    assert (logprobs.cpu() - expected[1]).abs().max() < 1e-5
    assert kept == expected[2]


def test_the_random_numbers_are_philox(device):
    """Among V equally likely tokens the drawn one is the first whose share of them exceeds the number."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789123456789], device=device)
    positions = torch.tensor([0, 7, 2**32 + 5, 1, 2**31, 99], device=device)
    width = 2**16
    one = torch.ones(len(seeds), device=device)
    requests = untruncated((one, one, one, one, seeds, positions, one))
    logits = torch.zeros(len(seeds), width, device=device)
    tokens, _, _ = sampled(DevicePath(), logits, requests, truncating=False)
    numbers = [uniform(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert tokens.tolist() == [int(number * width) for number in numbers]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_among_any_neighbours_and_at_any_address(device, width):
    requests = settings(ROWS, device)
    logits = logits_of(requests[-1], width)
    tokens, logprobs, kept = sampled(DevicePath(), logits, requests)
    shifted = torch.empty(logits.numel() + 1, device=device)[1:].view_as(logits).copy_(logits)
    for begin, end, source in ((0, 1, logits), (3, 20, logits), (41, 60, logits), (0, 60, shifted), (7, 8, shifted)):
        part = sampled(DevicePath(), source[begin:end], tuple(request[begin:end] for request in requests))
        assert torch.equal(part[0], tokens[begin:end]) and torch.equal(part[1], logprobs[begin:end])
        assert part[2] == kept[begin:end]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_recorded_set_gives_the_log_probability_of_the_draw_to_the_bit(device, width):
    requests = settings(ROWS, device)
    logits = logits_of(requests[-1], width)
    tokens, logprobs, kept = sampled(DevicePath(), logits, requests)
    ids = [torch.frombuffer(bytearray(row), dtype=torch.int32) if row else torch.empty(0) for row in kept]
    sets = torch.tensor([0, *map(len, ids)]).cumsum(0), torch.cat(ids).to(torch.int32)
    there = tuple(part.to(device) for part in sets)
    (again, entropy, *_), bad = DevicePath().token_logprobs(logits, tokens, requests[0], there)
    assert bad == -1 and torch.equal(again, logprobs)
    inputs = logits.cpu(), tokens.cpu(), requests[0].cpu(), sets
    (expected, expected_entropy, *_), bad = TorchPath().token_logprobs(*inputs)
    assert bad == -1
    assert (again.cpu() - expected).abs().max() < 1e-5 and (entropy.cpu() - expected_entropy).abs().max() < 1e-4


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
def test_gradients_are_those_of_plain_torch(device, entropy, limited):
    torch.manual_seed(3)
    logits, targets, heat = 2 * torch.randn(7, 9001), torch.arange(7), torch.tensor([1.0, 0.0, 0.7, 2.0, 1.0, 1.0, 1.0])
    kept = (torch.tensor([0, 0, 3, 3, 3, 3, 3, 3]), torch.tensor([1, 40, 9000], dtype=torch.int32)) if limited else None
    pulls = torch.randn(7), torch.randn(7) if entropy else None
    found = []
    for path, where in ((TorchPath(), "cpu"), (DevicePath(), device)):
        inputs = tuple(part.to(where) for part in (logits, targets, heat))
        sets = None if kept is None else tuple(part.to(where) for part in kept)
        (_, spread, maximum, log_sum), bad = path.token_logprobs(*inputs, sets)
        assert bad == -1
        saved = (*inputs, spread, maximum, log_sum)
        there = tuple(None if pull is None else pull.to(where) for pull in pulls)
        gradient = path.token_logprobs_backward(saved, *there, sets)
        assert torch.equal(inputs[0].cpu(), logits), "logits that are not spent stay"
        spent = path.token_logprobs_backward(saved, *there, sets, spent=True)
        assert torch.equal(spent, gradient)
        found.append(gradient.cpu())
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_a_row_that_is_no_distribution_gives_a_token_and_no_number(device):
    logits = torch.full((2, 5000), float("nan"), device=device)
    requests = tuple(part[:2] for part in untruncated(settings(ROWS, device)))
    tokens, logprobs, _ = sampled(DevicePath(), logits, requests, truncating=False)
    assert all(0 <= token < 5000 for token in tokens.tolist()) and bool(logprobs.isnan().all())
