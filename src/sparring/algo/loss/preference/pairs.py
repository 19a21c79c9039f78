"""Losses over pairs of replies. Each algorithm (DPO, ORPO and others) defines the reward of a reply and the loss of a
reward margin; the rest is shared.

Shapes: M weighted tokens of a micro-batch, R rows, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from sparring.annotations import Annotation
from sparring.kernels.threads import add_at
from sparring.protocols import LossResult, Needs
from sparring.types import Sample


class ReplySums(NamedTuple):
    """Sums over the tokens of each reply: log-probability under the policy and under the reference (zeros without one),
    and number of tokens; the three tensors have one shape."""

    logprob: torch.Tensor
    reference: torch.Tensor
    length: torch.Tensor


class PairForm(Protocol):
    """Algorithm over pairs: a rule that a recipe names, with its settings. Torch-free until called. With
    `has_reference`, rows carry the annotation `reference`."""

    has_reference: ClassVar[bool]

    def reward(self, replies: ReplySums) -> torch.Tensor:
        """Compute the reward of each reply."""
        ...

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        """Compute the loss [P] of margins [P]: reward of the chosen reply less reward of the rejected one."""
        ...


class PairLoss:
    """loss = sum_p weight_p * form.loss(reward(chosen_p) - reward(rejected_p)) / denominator.

    A reply consists of all rows on its side of the group, so a reply with branches is still one. Its tokens are those
    with a weight; the token weights of a pair sum to the pair's weight. With equal pairs the denominator, the sum of
    all weights, is therefore the number of pairs. Implements `Loss`.
    """

    term = "preference"
    needs = Needs(quantities=frozenset({"logprob"}), unit="pair")

    def __init__(self, form: PairForm) -> None:
        self.form = form

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss from `logprob` [M] float32 with gradient, for complete pairs.

        Returns:
            A scalar, and as (sum, count) over pairs the metrics accuracy (share of pairs with a larger reward for the
                chosen reply; ties count half), reward_margin, reward_chosen and reward_rejected.
        """
        weights = micro_batch.weights[self.term]
        pair, side = sides(micro_batch, weights)
        reference = micro_batch.annotations[Annotation.REFERENCE] if self.form.has_reference else None
        rewards = self.form.reward(replies(quantities["logprob"], reference, pair * 2 + side, 2 * _count(pair))).view(
            -1, 2
        )
        of_pair = per_pair(weights, pair)
        margin = rewards[:, 0] - rewards[:, 1]
        loss = (of_pair * self.form.loss(margin)).sum() / micro_batch.denominators[self.term]
        return LossResult(loss=loss, metrics=pair_metrics(rewards.detach()))


def sides(micro_batch: Any, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair and the side of each of M tokens; refuse a pair that lacks a side (`ValueError`).

    The pair is a number from 0, or -1 for tokens of weight 0; the side is 0 for chosen, 1 for rejected.
    """
    weighted = weights != 0
    label = micro_batch.label[micro_batch.rows]
    _, pair = micro_batch.group[micro_batch.rows[weighted]].unique(return_inverse=True)
    everywhere = torch.full_like(micro_batch.rows, -1)
    everywhere[weighted] = pair
    side = (label < 0).long()
    if len((everywhere * 2 + side)[weighted].unique()) != 2 * _count(everywhere):
        raise ValueError("preference: a pair without a chosen or without a rejected reply")
    return everywhere, side


def replies(logprob: torch.Tensor, reference: torch.Tensor | None, which: torch.Tensor, count: int) -> ReplySums:
    """Sum the values of M tokens over `count` replies; `which` [M] numbers each token's reply, negative for none."""
    belongs = which >= 0

    def summed(values: torch.Tensor) -> torch.Tensor:
        return add_at(which[belongs], values[belongs].to(logprob.dtype), count)

    reference_values = torch.zeros_like(logprob) if reference is None else reference
    return ReplySums(summed(logprob), summed(reference_values), summed(torch.ones_like(logprob)))


def per_pair(weights: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Sum the token weights of each pair, [P]."""
    return add_at(pair[pair >= 0], weights[pair >= 0], _count(pair))


def pair_metrics(rewards: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Compute the metrics of rewards [P, 2]: chosen, rejected."""
    margin = rewards[:, 0] - rewards[:, 1]
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    names = ("accuracy", "reward_margin", "reward_chosen", "reward_rejected")
    values = torch.stack([right, margin.double(), *rewards.double().T]).sum(1).tolist()
    return {name: (value, len(margin)) for name, value in zip(names, values, strict=True)}


def rewards_of(form: PairForm, rows: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Compute the reward of each row's reply in float64, from log-probabilities as `Trainer.forward` returns them."""
    rewards = []
    for row, values in zip(rows, logprobs, strict=True):
        weighted = torch.tensor(row.weights[PairLoss.term]) != 0
        reference = (
            torch.tensor(row.annotations[Annotation.REFERENCE], dtype=torch.float64)[weighted]
            if form.has_reference
            else None
        )
        logprob = torch.tensor(values, dtype=torch.float64)[weighted]
        rewards.append(float(form.reward(replies(logprob, reference, torch.zeros(len(logprob), dtype=torch.int64), 1))))
    return rewards


def _count(pair: torch.Tensor) -> int:
    return int(pair.max()) + 1 if len(pair) else 0
