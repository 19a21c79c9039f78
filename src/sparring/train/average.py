"""Moving average of the trained weights, stored as a model that can compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparring.errors import refusal
from sparring.model.causal import CausalModel


@torch.no_grad()
def follow(averages: list[torch.Tensor], weights: list[torch.Tensor], decay: float) -> None:
    """Compute average = decay * average + (1 - decay) * weights in place (WARP, arXiv 2406.16768, section 3.1, whose mu
    is 1 - decay). An average that equals the weights stays bitwise unchanged."""
    # the formula as written would round, even for equal weights
    torch._foreach_lerp_(averages, weights, 1 - decay)


class Average:
    """Model whose weights are a moving average of the trained ones:

        average_0 = weights_0        average_n = decay average_{n-1} + (1 - decay) weights_n     after update n

    A decay of 0 gives the weights of the previous update. If an adapter is trained, only the adapter's factors are
    averaged. The average is stored in float32, whatever the model's dtype.

    Args:
        model: model with the initial weights of the training; only this object may change the model.
        decay: decay per update, from 0 to below 1.
    """

    def __init__(self, model: CausalModel, decay: float) -> None:
        self.model, self.decay = model, decay
        self._averaged = model.adapters.everywhere or model
        self._parameters = self._averaged.parameters()
        # a float32 parameter is its own average
        self._values = {name: tensor.detach().float() for name, tensor in self._parameters.items()}

    @torch.no_grad()
    def follow(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Move the average by one update of the trained `weights`, float32 by name."""
        names = sorted(weights)
        follow([self._values[name] for name in names], [weights[name] for name in names], self.decay)
        self._write_back()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the average by name, float32, without copying."""
        return dict(self._values)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the average from `state`; refuse the state of another model (`BadInput`)."""
        if state.keys() != self._values.keys():
            found = f"a difference in {sorted(state.keys() ^ self._values.keys())[:3]}"
            raise refusal("moving average", "this model's parameters", found, "restore the model it was saved from")
        for name, value in self._values.items():
            value.copy_(state[name])
        self._write_back()

    def _write_back(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                parameter.copy_(self._values[name])
        self._averaged.refresh()
