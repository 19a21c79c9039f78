"""Recurrent states of running sequences: everything that a layer's next token needs from earlier tokens.

Shapes: b sequences in one batch, S slots, C channels and K inputs of a convolution, n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Kind = tuple[str, int]
"""Key of a state of a mixer: its kind, "conv" or "recurrent", and its number within that kind."""


RecurrentLayers = Mapping[int, Mapping[Kind, torch.Tensor]]
"""For each recurrent layer, example states [1, ...] of one sequence, which give kinds, shapes and dtypes."""


class MixerCache:
    """Cache of one layer for b sequences, with the interface that transformers' mixers call.

    Attributes:
        states: state [b, ...] of each kind: the last inputs [b, C, K] of a convolution, or the state of a recurrence;
            empty at the beginning of sequences.
    """

    def __init__(self, states: dict[Kind, torch.Tensor] | None = None) -> None:
        self.states = states or {}

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state [b, C, K], which the mixer may change in place."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state [b, ...], which the mixer may change in place."""
        return self.states.get(("recurrent", state_idx))

    def is_recording_past(self, _layer: int) -> bool:
        """Return False: states cannot be rolled back."""
        return False

    def update_conv_state(
        self, new: torch.Tensor, _layer: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """Store the last K inputs, including those before new[b, C, n] (zeros at the beginning); return all inputs."""
        before = self.states.get(("conv", state_idx))
        window = torch.cat([new.new_zeros(*new.shape[:2], conv_kernel_size) if before is None else before, new], dim=-1)
        self.states["conv", state_idx] = window[..., -conv_kernel_size:]
        return window

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Store the state after the last token."""
        self.states["recurrent", state_idx] = state
        return state


class RecurrentStates:
    """States of S sequences in all `recurrent` layers of a model (from `split`)."""

    def __init__(self, recurrent: RecurrentLayers, num_slots: int) -> None:
        self._layers = {
            layer: {kind: one.new_zeros(num_slots, *one.shape[1:]) for kind, one in states.items()}
            for layer, states in recurrent.items()
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Storage of the states."""
        return [states for layer in self._layers.values() for states in layer.values()]

    def read(self, layer: int, slots: torch.Tensor) -> MixerCache:
        """Copy the states in slots[b]."""
        return MixerCache({kind: states.index_select(0, slots) for kind, states in self._layers[layer].items()})

    def write(self, layer: int, slots: torch.Tensor, carried: MixerCache) -> None:
        """Write the states of b sequences to slots[b]."""
        for kind, states in self._layers[layer].items():
            states.index_copy_(0, slots, carried.states[kind])

    def copy(self, source: int, target: int) -> None:
        """Copy one slot's states, in every layer."""
        for layer in self._layers.values():
            for states in layer.values():
                states[target] = states[source]


def state_bytes(recurrent: RecurrentLayers) -> int:
    """Return the bytes of one sequence's states."""
    return sum(one.nbytes for states in recurrent.values() for one in states.values())
