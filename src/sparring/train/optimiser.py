"""AdamW on float32 master weights with float32 gradient accumulation, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sparring.errors import refusal
from sparring.kernels.threads import one_thread
from sparring.train.config import TrainConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimiser:
    """AdamW (Decoupled weight decay regularization, arXiv 1711.05101, algorithm 2) over named parameters.

    A contiguous float32 parameter is its own master. Any other parameter gets a contiguous float32 master, whose
    gradients accumulate in float32 over micro-batches; `cast` returns the values to write back.

    Masters, gradients and moments are contiguous, because the fused AdamW on a CPU reads memory in order and ignores
    strides (torch 2.13). Autograd often returns views: parts of a joined product's gradient, or transposes.

    Args:
        parameters: parameters by name; those without `requires_grad` are ignored.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> None:
        self._clip = config.gradient_clip
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 and p.is_contiguous() else nn.Parameter(p.detach().float().contiguous())
            for name, p in self._parameters.items()
        }
        self._reordered: set[str] = set()
        decayed = [master for master in self._masters.values() if master.ndim >= 2]
        others = [master for master in self._masters.values() if master.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    @property
    def has_masters(self) -> bool:
        """True if a parameter is not its own master and has to be written back after a step."""
        return any(self._masters[name] is not p for name, p in self._parameters.items())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters."""
        return list(self._parameters.values())

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """Trained weights by name, float32, without copying."""
        return {name: master.detach() for name, master in self._masters.items()}

    @property
    def reordered(self) -> frozenset[str]:
        """Names of parameters with at least one non-contiguous gradient."""
        return frozenset(self._reordered)

    @property
    def names(self) -> list[str]:
        """Names of `parameters`, in the same order."""
        return list(self._parameters)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of one micro-batch, in the order of `parameters`; None for a parameter without a
        gradient."""
        for name, gradient in zip(self._masters, gradients, strict=True):
            if gradient is not None:
                self.add_one(name, gradient)

    def add_one(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient of one parameter. The tensor is copied, because autograd may reuse it."""
        if not gradient.is_contiguous():
            self._reordered.add(name)
        master = self._masters[name]
        if master.grad is None:
            master.grad = torch.empty_like(master).copy_(gradient)
        else:
            master.grad.add_(gradient)

    def step(self, rate: float) -> float:
        """Clip the gradients, update the masters and drop the gradients.

        Returns:
            The global gradient norm before clipping. If it is not finite, nothing was updated.
        """
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        with one_thread():
            norm = torch.nn.utils.get_total_norm(gradients)
        if torch.isfinite(norm):
            if self._clip and norm > self._clip:
                torch._foreach_mul_(gradients, self._clip / norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self.discard()
        return norm.item()

    def discard(self) -> None:
        """Drop all gradients."""
        for master in self._masters.values():
            master.grad = None

    def cast(self) -> dict[str, torch.Tensor]:
        """Return all master weights in their parameters' dtypes."""
        return {name: self._masters[name].detach().to(p.dtype) for name, p in self._parameters.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Return moments, step counts and separate master weights, by `<kind>/<parameter>`."""
        tensors = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                tensors[f"master/{name}"] = master.detach()
            for kind, value in self._adamw.state.get(master, {}).items():
                tensors[f"{kind}/{name}"] = value
        return tensors

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the optimiser from `state`.

        Raises:
            BadInput: the tensors belong to other parameters or another dtype.
        """
        self.discard()
        masters = {name for name, master in self._masters.items() if master is not self._parameters[name]}
        stored = {name.removeprefix("master/") for name in tensors if name.startswith("master/")}
        if masters != stored:
            do = "restore with the dtype it was saved with"
            raise refusal("optimiser state", f"{len(masters)} float32 master weights", str(len(stored)), do)
        strangers = {name.partition("/")[2] for name in tensors} - self._masters.keys()
        if strangers:
            do = "restore the model it was saved from"
            raise refusal("optimiser state", "this model's parameters", f"also {min(strangers)}", do)
        with torch.no_grad():
            for name in masters:
                self._masters[name].copy_(tensors[f"master/{name}"])
        self._adamw.state.clear()
        for name, master in self._masters.items():
            if f"step/{name}" in tensors:
                moments = {kind: tensors[f"{kind}/{name}"].to(master.device).clone() for kind in _MOMENTS}
                self._adamw.state[master] = {"step": tensors[f"step/{name}"].to(master.device).clone(), **moments}


def learning_rate(config: TrainConfig, step: int, total_steps: int, *, ends_late: bool = False) -> float:
    """Return the learning rate of the optimiser step that follows `step` finished ones.

    Warm-up: peak * (step + 1) / warmup_steps. Then, with x from 0 at the next step to 1 at the last one and m =
    min_ratio: constant 1, linear 1 - (1 - m) x, cosine m + (1 - m) (1 + cos(pi x)) / 2 (SGDR, arXiv 1608.03983,
    equation 5), times the peak. A schedule of one step is at its peak; a single step after a warm-up is at the end (x =
    1).

    Args:
        total_steps: number of optimiser steps in the schedule.
        ends_late: let x reach 1 one step after the last, as older runs did (`begun.Begun`).
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = total_steps - config.warmup_steps - (0 if ends_late else 1)
    x = min(1.0, (step - config.warmup_steps) / span) if span > 0 else float(config.warmup_steps > 0)
    if config.schedule == "linear":
        share = 1.0 - (1.0 - config.min_ratio) * x
    elif config.schedule == "cosine":
        share = config.min_ratio + (1.0 - config.min_ratio) * (1.0 + math.cos(math.pi * x)) / 2
    else:
        share = 1.0
    return config.learning_rate * share
