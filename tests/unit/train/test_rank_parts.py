"""Gradients of parts that are dealt to ranks: added in the order of the parts, by whoever owns them."""

import pytest
import torch
from ranks import in_ranks
from torch import nn

from sparring.errors import OtherRankFailed
from sparring.train import exchange
from sparring.train.blocks import BLOCK
from sparring.train.config import TrainConfig
from sparring.train.measure import Measures
from sparring.train.optimiser import Optimiser
from sparring.train.parts import Part
from sparring.train.rank_parts import Dealt, exchanged

ROWS = [[str(part)] for part in range(5)]
"""Stand for the rows of five parts."""


def weights():
    draw = torch.Generator().manual_seed(2)
    shapes = {"cut": (BLOCK, 5), "unused": (3,), "sometimes": (7,), "views": (4, 6)}
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


def compute(parameters, rows):
    """The loss of a part, whose gradients are of very different sizes, so that their order shows in the sum. Part 1 has
    no gradient of `sometimes`, and the others' is -0.0; part 3 has no tokens."""
    part = int(rows[0])
    if part == 3:
        return None
    if part == 7:
        raise ZeroDivisionError
    loss = ((10.0**part) * parameters["cut"].sin()).sum() + (parameters["views"].t()[1:] ** 2).sum() * part
    if part != 1:
        loss = loss + (parameters["sometimes"] * -0.0).sum()
    return Part(loss, lambda: Measures(0).plain())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("at_once", [1, exchange.BUCKET])
def test_a_sum_has_the_bits_of_one_process_and_the_sign_of_its_zeros(count, at_once):
    parameters = weights()
    alone = Optimiser(parameters, TrainConfig())
    for rows in ROWS:
        if (part := compute(parameters, rows)) is not None:
            alone.add(torch.autograd.grad(part.loss, alone.parameters, allow_unused=True))

    def work(ranks):
        mine = weights()
        optimiser = Optimiser(mine, TrainConfig(), ranks)
        parts = Dealt(optimiser, ranks, exchanged(optimiser, ranks, at_once))
        assert len(list(parts.run([ROWS[:2], ROWS[2:]], lambda rows: compute(mine, rows)))) == 4
        return optimiser.ranges, {name: master.grad for name, master in optimiser._masters.items()}

    found = in_ranks(count, work)
    assert len(found[0][0]) == 1, "the first tensor is cut"
    for ranges, gradients in found:
        for name, (begin, end) in ranges.items():
            expected = parameters[name].grad
            assert (gradients[name] is None) == (expected is None) == (name == "unused")
            if expected is not None:
                part = expected.reshape(-1)[begin:end]
                assert torch.equal(part, gradients[name].reshape(-1))
                assert torch.equal(part.signbit(), gradients[name].reshape(-1).signbit())


def test_an_error_of_one_rank_is_raised_in_all_and_leaves_no_gradient():
    def work(ranks):
        mine = weights()
        optimiser = Optimiser(mine, TrainConfig(), ranks)
        parts = Dealt(optimiser, ranks, exchanged(optimiser, ranks))
        with pytest.raises(ZeroDivisionError if ranks.rank == 1 else OtherRankFailed):
            list(parts.run([[["0"], ["1"]], [["2"], ["7"]]], lambda rows: compute(mine, rows)))
        return optimiser.step(0.0), len(list(parts.run([ROWS], lambda rows: compute(mine, rows))))

    assert in_ranks(2, work) == [(0.0, 4)] * 2


def test_a_rank_whose_shard_has_no_gradient_steps_with_the_others():
    """Three ranks share one block, so that two have nothing, and the step is clipped."""

    def work(ranks):
        weight = nn.Parameter(torch.ones(2))
        optimiser = Optimiser({"weight": weight}, TrainConfig(gradient_clip=0.5), ranks)
        part = Part((weight * 3.0).sum(), lambda: Measures(0).plain())
        list(Dealt(optimiser, ranks, exchanged(optimiser, ranks)).run([[["0"]]], lambda rows: part))
        norm = optimiser.step(0.25)
        optimiser.write_back()
        return norm, weight.tolist(), list(optimiser.state())

    found = in_ranks(3, work)
    assert {(norm, *weight) for norm, weight, _ in found} == {(18.0**0.5, 0.75, 0.75)}
    assert [len(state) for *_, state in found] == [3, 0, 0]
