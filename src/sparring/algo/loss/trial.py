"""Trial of own gates, losses and corrections on drawn tokens, against difference quotients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sparring.algo.config import AlgoConfig
from sparring.algo.tokens import PolicyTokens
from sparring.errors import refusal

TOKENS = 24
STEP = 1e-6
"""Change of a log-probability from which a difference quotient is formed."""


def try_on_tokens(algo: AlgoConfig, place: str, name: str) -> None:
    """Refuse a gate, loss or correction whose values on drawn tokens are wrong.

    Args:
        place: key of the rule in `[algo]`.
        name: the rule's name in the recipe.

    Raises:
        BadInput: the values are not finite, are not one for each token, or have another gradient than their difference
            quotients; a correction's have a gradient; or an idle token has one, without `moves_idle_tokens`.
    """
    where, tokens = f"algo.{place}", _drawn_tokens()
    with _Constants() as constants:
        values = _values(algo, place, tokens)
    if values.shape != (TOKENS,) or not values.isfinite().all():
        got = f"shape {list(values.shape)}: {values.detach().tolist()}"
        raise refusal(where, f"{name} to give {TOKENS} finite numbers", got, "give one for each token")
    if place == "correction":
        if values.requires_grad or (values < 0).any():
            got = "a gradient" if values.requires_grad else f"{values.min():g}"
            raise refusal(where, f"{name} to give weights of at least 0 without gradient", got, "use detach()")
        return
    if not values.requires_grad:
        raise refusal(where, f"{name} to depend on tokens.logprob", "no gradient", "do not detach it throughout")
    [gradient] = torch.autograd.grad(values.sum(), tokens.logprob)

    def summed(change: torch.Tensor) -> float:
        with _Constants(constants.kept):
            moved = _values(algo, place, replace(tokens, logprob=tokens.logprob + change))
        return moved.sum().item()

    for change, slope in zip(STEP * torch.eye(TOKENS, dtype=torch.float64), gradient.tolist(), strict=True):
        quotient = (summed(change) - summed(-change)) / (2 * STEP)
        if abs(quotient - slope) > 1e-4 * max(1.0, abs(quotient)):
            got = f"{slope:g} where a difference quotient is {quotient:g}"
            raise refusal(where, f"{name} to have the gradient of its values", got, "correct its backward pass")
    rule = getattr(algo, place)
    idle = tokens.advantages == 0
    if algo.unit == "token" and not rule.moves_idle_tokens and gradient[idle].any():
        expected = f"{name} to have no gradient at tokens with an advantage of 0"
        raise refusal(where, expected, f"{gradient[idle].tolist()}", "set moves_idle_tokens = True in its class")


def _values(algo: AlgoConfig, place: str, tokens: PolicyTokens) -> torch.Tensor:
    """Compute the values of one rule, [M]."""
    if place == "correction":
        return algo.correction_rule(tokens.logprob.detach(), tokens).weights
    if place == "loss":
        assert algo.loss is not None, "it is the one that is tried"
        return algo.loss(tokens)
    return algo.gate(algo.ratio(tokens), tokens).surrogate


def _drawn_tokens() -> PolicyTokens:
    """Draw tokens of four sequences with two turns each. Every annotation is 1 at each token."""
    generator = torch.Generator().manual_seed(0)
    now, before, advantages = torch.randn(3, TOKENS, generator=generator, dtype=torch.float64)
    logprob = -1.0 - 0.3 * now
    anchor = -1.0 - 0.3 * now + 0.2 * before
    number = torch.arange(TOKENS)
    return PolicyTokens(
        logprob=logprob.requires_grad_(),
        anchor=anchor,
        behaviour=anchor,
        advantages=advantages * (number % 6 != 0),
        entropy=torch.ones(TOKENS, dtype=torch.float64),
        weighted=number >= 0,
        sequences=number // 6,
        turns=number // 3,
        annotations=defaultdict(partial(torch.ones, TOKENS, dtype=torch.float64)),
    )


class _Constants(TorchFunctionMode):
    """Context that keeps the tensors that are computed in it without gradient (`detach`, `no_grad`), or computes with
    those kept before, in their order: a gradient takes them to be constant.

    Attributes:
        kept: the tensors.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._before, self.kept = iter(before), list[torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (func is torch.Tensor.detach or not torch.is_grad_enabled()):
            result = next(self._before, result)
            self.kept.append(result)
        return result
