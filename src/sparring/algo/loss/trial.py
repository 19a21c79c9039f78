"""Trial of users' gates, losses and corrections on random tokens: in parts, at once, against difference quotients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sparring.algo.config import AlgoConfig
from sparring.algo.tokens import PolicyTokens
from sparring.annotations import Annotation
from sparring.errors import refusal

TOKENS = 24
STEP = 1e-6
"""Change of a log-probability from which a difference quotient is formed."""
FIELDS = ("logprob", "anchor", "behaviour", "advantages", "entropy", "weighted", "sequences", "turns")
LEAVES_GRADIENT = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def try_on_tokens(algo: AlgoConfig, place: str, name: str) -> None:
    """Refuse the gate, loss or correction `name`, at key `place` of `[algo]`, if its values on drawn tokens are wrong.

    Raises:
        BadInput: the values are not finite, are not one for each token, change in a second call or with the other
            tokens of a micro-batch, or have another gradient than their difference quotients; the input is changed; a
            correction's values have a gradient; or a unit of advantages 0 has one, without `moves_idle_tokens`.
    """
    where, unit = f"algo.{place}", algo.unit
    values = _try_in_parts(algo, place, name)
    if place == "correction":
        if values.requires_grad or (values < 0).any():
            actual = "a gradient" if values.requires_grad else f"{values.min():g}"
            raise refusal(where, f"{name} to give weights of at least 0 without gradient", actual, "use detach()")
        return
    if not values.requires_grad:
        raise refusal(where, f"{name} to depend on tokens.logprob", "no gradient", "do not detach it throughout")
    tokens, constants = _drawn_tokens(), _Constants()
    [gradient] = torch.autograd.grad(constants.held(partial(_values, algo, place, tokens)).sum(), tokens.logprob)
    for at in range(TOKENS):
        higher, lower = (
            constants.held(partial(_values, algo, place, _drawn_tokens(at, step))).detach().sum().item()
            for step in (STEP, -STEP)
        )
        quotient = (higher - lower) / (2 * STEP)
        if abs(quotient - float(gradient[at])) > 1e-4 * max(1.0, abs(quotient)):
            actual = f"{float(gradient[at]):g} where a difference quotient is {quotient:g}"
            raise refusal(where, f"{name} to have the gradient of its values", actual, "correct its backward pass")
    rule = getattr(algo, place)
    idle = tokens.sum(tokens.advantages.abs(), unit) == 0
    if not rule.moves_idle_tokens and gradient[idle].any():
        expected = f"{name} to have no gradient at a {unit} without an advantage other than 0"
        raise refusal(where, expected, f"{gradient[idle].tolist()}", "set moves_idle_tokens = True in its class")


def _try_in_parts(algo: AlgoConfig, place: str, name: str) -> torch.Tensor:
    """Return the values of all tokens at once, after comparing them with a second call and with each unit alone, in
    float32 as in a run."""
    refuse, (tokens, same) = partial(refusal, f"algo.{place}"), (_drawn_tokens(dtype=torch.float32) for _ in range(2))
    values = _values(algo, place, tokens)
    if values.shape != (TOKENS,) or not values.isfinite().all():
        actual = f"shape {list(values.shape)}: {values.detach().tolist()}"
        raise refuse(f"{name} to give {TOKENS} finite numbers", actual, "give one for each token")
    if changed := [field for field in FIELDS if not torch.equal(getattr(tokens, field), getattr(same, field))]:
        raise refuse(f"{name} to leave its input as it is", f"another tokens.{changed[0]}", "change a clone() of it")
    if not torch.equal(values, again := _values(algo, place, same)):
        actual = f"{values.tolist()} and {again.tolist()}"
        raise refuse(f"{name} to give the same in a second call", actual, "use no random numbers and no state")
    index = {"token": torch.arange(TOKENS), "turn": same.turns, "sequence": same.sequences}[algo.unit]
    for number in index.unique():
        beside, alone = values[index == number], _values(algo, place, _selected(same, index == number))
        if not torch.allclose(beside, alone, rtol=1e-4, atol=1e-5):
            expected = f"{name} to give a {algo.unit} the same beside any others of a micro-batch"
            fix = 'combine the tokens of one unit only; `unit = "sequence"` in its class makes that a sequence'
            raise refuse(expected, f"{beside.tolist()} and, alone, {alone.tolist()}", fix)
    return values


def _values(algo: AlgoConfig, place: str, tokens: PolicyTokens) -> torch.Tensor:
    if place == "correction":
        return algo.correction_rule(tokens.logprob.detach(), tokens).weights
    if place == "loss":
        assert algo.loss is not None, "it is the one that is tried"
        return algo.loss(tokens)
    gated = algo.gate(algo.ratio(tokens), tokens)
    if gated.stopped.shape != gated.surrogate.shape:
        raise ValueError(f"stopped has shape {list(gated.stopped.shape)}, surrogate {list(gated.surrogate.shape)}")
    return gated.surrogate


def _drawn_tokens(at: int = 0, step: float = 0.0, dtype: torch.dtype = torch.float64) -> PolicyTokens:
    """Draw four sequences of two turns; the last sequence is idle (advantage 0). Change the log-probability of token
    `at` by `step`. Annotations are 1."""
    generator = torch.Generator().manual_seed(0)
    now, before, advantages = torch.randn(3, TOKENS, generator=generator, dtype=torch.float64).to(dtype)
    logprob = -1.0 - 0.3 * now
    logprob[at] += step
    anchor = -1.0 - 0.3 * now + 0.2 * before
    number = torch.arange(TOKENS)
    return PolicyTokens(
        logprob=logprob.requires_grad_(),
        anchor=anchor,
        behaviour=anchor.clone(),
        advantages=advantages * ((number % 6 != 0) & (number < 18)),
        entropy=torch.ones(TOKENS, dtype=dtype),
        weighted=number >= 0,
        sequences=number // 6,
        turns=number // 3,
        annotations=_ones(TOKENS, dtype),
    )


def _selected(tokens: PolicyTokens, mask: torch.Tensor) -> PolicyTokens:
    chosen = {field: getattr(tokens, field)[mask] for field in FIELDS}
    for unit in ("sequences", "turns"):
        chosen[unit] = chosen[unit].unique(return_inverse=True)[1]
    return PolicyTokens(**chosen, annotations=_ones(int(mask.sum()), tokens.anchor.dtype))


def _ones(count: int, dtype: torch.dtype) -> dict[Annotation, torch.Tensor]:
    return {name: torch.ones(count, dtype=dtype) for name in Annotation}


class _Constants(TorchFunctionMode):
    """Tensors that a function computes without gradient (`detach`, `no_grad`) in its first call. Later calls get the
    same tensors: the gradient treats them as constants. All are float64: float32 is too coarse."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = []

    def held(self, function: Any) -> torch.Tensor:
        """Call a function under these constants."""
        self._given: list[torch.Tensor] = []
        self._no_grad = False
        with self:
            result: torch.Tensor = function()
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:  # a forward pass with its own backward pass computes without it too
            self._no_grad = not args[0]
        func = torch.Tensor.double if func is torch.Tensor.float else func
        result = func(*map(_wide, args), **{key: _wide(value) for key, value in (kwargs or {}).items()})
        if not isinstance(result, torch.Tensor):
            return result
        result = result.double() if result.dtype is torch.float32 else result
        memory = result.untyped_storage().data_ptr()  # a view of a constant, or one changed in place, is no new one
        if (
            not self._no_grad
            and func not in LEAVES_GRADIENT
            or any(memory == given.untyped_storage().data_ptr() for given in self._given)
        ):
            return result
        if len(self._given) == len(self._kept):
            self._kept.append(result.detach().clone())
        self._given.append(self._kept[len(self._given)].clone())
        return self._given[-1]


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
