"""Gradients of lanes, added up in the lanes' order whoever comes first."""

from threading import Barrier, Thread

import pytest
import torch
from torch import nn

from sparring.train.config import TrainConfig
from sparring.train.lane_sums import LaneSums
from sparring.train.optimiser import Optimiser


def parameters():
    draw = torch.Generator().manual_seed(5)
    return {name: nn.Parameter(torch.randn(40, 30, generator=draw)) for name in ("one", "two", "unused")}


def loss(weights, lane):
    """Of both weights; lane 1 has a gradient of the first alone."""
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(lane))
    y = (x @ weights["one"]).tanh().sum()
    return y if lane == 1 else y * (weights["two"] * (lane + 1)).sin().sum()


def summed(order, *, lanes=3):
    """Masters' gradients after lanes that were computed one after the other in `order`."""
    weights = parameters()
    optimiser = Optimiser(weights, TrainConfig())
    sums = LaneSums(optimiser, one_thread=True)
    with sums.collecting():
        for _ in range(2):
            sums.begin()
            for lane in order:
                sums.backward(lane, loss(weights, lane))
                sums.end(lane)
    assert sorted(order) == list(range(lanes))
    return {name: weight.grad for name, weight in weights.items()}


def test_the_bits_are_those_of_lanes_in_their_order():
    weights = parameters()
    optimiser = Optimiser(weights, TrainConfig())
    for _ in range(2):
        for lane in range(3):
            optimiser.add(torch.autograd.grad(loss(weights, lane), list(weights.values()), allow_unused=True))
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        found = summed(order)
        assert found["unused"] is None
        assert all(torch.equal(found[name], weights[name].grad) for name in ("one", "two"))


def test_parallel_lanes_give_the_same_bits():
    weights, expected, barrier = parameters(), summed((0, 1), lanes=2), Barrier(2)
    sums = LaneSums(Optimiser(weights, TrainConfig()), one_thread=False)

    def compute(lane):
        value = loss(weights, lane)
        barrier.wait()
        sums.backward(lane, value)
        sums.end(lane)

    with sums.collecting():
        for _ in range(2):
            sums.begin()
            threads = [Thread(target=compute, args=(lane,)) for lane in (1, 0)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert all(torch.equal(weights[name].grad, expected[name]) for name in ("one", "two"))


def test_no_lane_holds_a_set_of_gradients():
    """Of a chain of products each gradient is let go when it is added: autograd holds one number in its place."""
    weights = {str(place): nn.Parameter(torch.eye(64)) for place in range(6)}
    optimiser, held = Optimiser(weights, TrainConfig()), []
    sums = LaneSums(optimiser, one_thread=True)
    with sums.collecting():
        for weight in weights.values():
            weight.register_hook(lambda gradient: held.append(gradient.untyped_storage().nbytes()))
        x = torch.ones(1, 64)
        for weight in weights.values():
            x = x @ weight
        sums.begin()
        sums.backward(0, x.sum())
    assert held == [4] * len(weights) and all(weight.grad is not None for weight in weights.values())


def test_an_error_discards_all_gradients_and_removes_the_hooks():
    weights = parameters()
    sums = LaneSums(Optimiser(weights, TrainConfig()), one_thread=True)
    with pytest.raises(ZeroDivisionError), sums.collecting():
        sums.begin()
        sums.backward(0, loss(weights, 0))
        raise ZeroDivisionError
    assert all(weight.grad is None for weight in weights.values())
    gradient = torch.autograd.grad(loss(weights, 0), weights["one"])[0]
    assert gradient.untyped_storage().nbytes() == gradient.nbytes
