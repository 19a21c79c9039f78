"""Layers with a recurrent state: transformers' own mixers, each sequence of a forward computed from its own state.

transformers calls a mixer with sequences of one length and a cache of their states. Here the tokens of all sequences
are concatenated, so a mixer is called once per sequence length: once for all sequences that generate, and once for each
length of a prompt's chunk. Shapes: N tokens, b sequences of n tokens each, S slots.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from sparring.kernels.threads import take
from sparring.model.attention import Attention, Paged
from sparring.model.lora import AdapterAssignment, Adapters
from sparring.model.states import MixerCache, RecurrentLayers, RecurrentStates

LAYOUT = "sparring_layout"
"""Keyword that carries a `MixerLayout` through transformers' forward to its mixers."""


class MixerBatch(NamedTuple):
    """Sequences of one length that a mixer computes in one call.

    Attributes:
        rows: [b, n] int64, indices of their tokens.
        num_shared: number of leading tokens that are computed only for the state, because another batch outputs them.
        slots: [b] int64, indices of their states; None for whole sequences.
        has_state: whether earlier tokens left a state.
    """

    rows: torch.Tensor
    num_shared: int
    slots: torch.Tensor | None
    has_state: bool
    assignment: AdapterAssignment | None


class MixerLayout(NamedTuple):
    """Batches of all sequences of a forward.

    Attributes:
        order: [N] int64, index of each token in the concatenated outputs of the batches.
        states: states of the sequences; None in training.
    """

    batches: list[MixerBatch]
    order: torch.Tensor
    states: RecurrentStates | None
    adapters: Adapters

    @staticmethod
    def of(attention: Attention, device: torch.device, adapters: Adapters) -> MixerLayout:
        """Group sequences of equal length and equal beginning into batches."""
        paths, slots, states = _paths(attention)
        members: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
        for index, (rows, num_shared, has_state) in enumerate(paths):
            if len(rows) > num_shared:
                members[len(rows), num_shared, has_state].append(index)
        batches = []
        for (_, num_shared, has_state), same in members.items():
            rows = torch.stack([paths[index].rows for index in same])
            where = None if slots is None else slots[same].to(device)
            batches.append(
                MixerBatch(rows.to(device), num_shared, where, has_state, adapters.assignment_of(rows.flatten()))
            )
        order = torch.cat([batch.rows[:, batch.num_shared :].flatten() for batch in batches]).argsort()
        return MixerLayout(batches, order, states, adapters)


class _SequenceRows(NamedTuple):
    """Token indices [n] of a sequence, which shares the first `num_shared` with another sequence; `has_state` is True
    if earlier calls computed tokens of the sequence."""

    rows: torch.Tensor
    num_shared: int
    has_state: bool


def _paths(attention: Attention) -> tuple[list[_SequenceRows], torch.Tensor | None, RecurrentStates | None]:
    if isinstance(attention, Paged):
        assert attention.states is not None, "pages of a recurrent model come with states"
        states, slots = attention.states
        cu_rows, ends = attention.rows.cu_rows.tolist(), attention.rows.context_lengths.tolist()
        bounds = zip(cu_rows, cu_rows[1:], ends, strict=False)
        return (
            [_SequenceRows(torch.arange(begin, end), 0, length > end - begin) for begin, end, length in bounds],
            slots,
            states,
        )
    offsets = attention.cu_seqlens.tolist()
    shared = [0] * len(offsets) if attention.shared is None else attention.shared.tolist()
    paths, path = [], torch.arange(0)
    for begin, end, num_shared in zip(offsets, offsets[1:], shared, strict=False):
        path = torch.cat([path[:num_shared], torch.arange(begin, end)])
        paths.append(_SequenceRows(path, num_shared, False))
    return paths, None, None


@torch.no_grad()
def split(module: PreTrainedModel) -> RecurrentLayers:
    """Make transformers' mixers compute flat tokens by a `MixerLayout`; parameters keep their names. Return the
    recurrent layers, none in most models."""
    recurrent: dict[int, Mapping[tuple[str, int], torch.Tensor]] = {}
    token = torch.zeros_like(module.get_input_embeddings().get_parameter("weight")[:1]).unsqueeze(0)
    for mixer in filter(_is_mixer, module.modules()):
        carried, cache = MixerCache(), _cache_of(mixer)
        mixer(token, **{cache: carried})
        layer = mixer.layer_idx
        assert isinstance(layer, int)
        recurrent[layer] = carried.states
        mixer.forward = partial(_forward, mixer.forward, cache, layer)
    return recurrent


def _is_mixer(part: nn.Module) -> bool:
    """Return True if a module takes a cache of states, has a convolution and has a layer index."""
    convolves = isinstance(getattr(part, "conv1d", None), nn.Conv1d) and hasattr(part, "layer_idx")
    return convolves and bool(_cache_of(part))


def _cache_of(part: nn.Module) -> str:
    """Return the name of the parameter that takes a module's cache of states; empty for a module without one."""
    parameters = inspect.signature(part.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in parameters), "")  # cache since transformers 5.24


def _forward(mix: Any, cache_name: str, layer: int, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute hidden_states[1, N, D] -> [1, N, D] with a layout; call transformers' own forward without one."""
    layout: MixerLayout | None = options.pop(LAYOUT, None)
    if layout is None:
        mixed: torch.Tensor = mix(hidden_states, **options)
        return mixed
    outputs = []
    for rows, num_shared, slots, has_state, assignment in layout.batches:
        carried = None
        if layout.states is not None and slots is not None:
            carried = layout.states.read(layer, slots) if has_state else MixerCache()
        with layout.adapters.assigned(assignment):
            inputs = take(hidden_states[0], rows.flatten()).unflatten(0, rows.shape)
            output = mix(inputs, **{cache_name: carried})
        if layout.states is not None and slots is not None and carried is not None:
            layout.states.write(layer, slots, carried)
        outputs.append(output[:, num_shared:].flatten(0, 1))
    return take(torch.cat(outputs), layout.order).unsqueeze(0)
