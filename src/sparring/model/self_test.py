"""Self-test at load: a model outside our own tests computes what transformers computes, and does so row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from sparring.errors import refusal
from sparring.kernels import ops
from sparring.kernels.pages import BLOCK
from sparring.model.attention import IMPLEMENTATION, Packed, Paged
from sparring.model.causal import CausalModel, kv_heads_of
from sparring.model.states import RecurrentStates

LENGTHS = (5, 1, 17, 2, 8, 30)
"""Sequence lengths of the test: odd, single, and multiples of the vector width."""

WINDOW = 7


@torch.no_grad()
def verify_against_library(model: CausalModel, where: str, *, exact: bool) -> None:
    """Compare the model with transformers' own call and, for exact numerics, each sequence alone with all packed, and
    one sequence computed in pieces over pages. Also sets `kv_heads`, `logit_scale` and `logit_cap`, which configs name
    inconsistently.

    Raises:
        BadInput: the logits differ from transformers' (an unknown head or attention), sequences see each other or do
            not continue from their recurrent state, or, for exact numerics, a row's bits depend on the batch or may do
            so, because transformers calls a function that `RowWise` does not know. A function that only other calls
            reach (longer ones, or with gradients) is refused at that call if the model needed replacements at load, and
            otherwise goes unnoticed.
    """
    lengths = [length for length in LENGTHS if length <= model.max_positions]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(model.vocab_size, (length,), generator=generator).to(model.device) for length in lengths]
    with _short_windows(model.module):
        model.kv_heads = kv_heads_of(model.module)
        wanted = _library_outputs(model, rows[-1])
        _find_logits(model, rows[-1], wanted)
        alone = [_outputs(model, [row]) for row in rows]
        packed = _outputs(model, rows).split(lengths)
    name = type(model.module).__name__
    if not _close(model, alone[-1], wanted):
        expected = "the logits of transformers, from our attention and a linear head"
        raise refusal(where, expected, f"{name}, whose logits differ", "choose another model")
    if not all(_close(model, a, b) for a, b in zip(alone, packed, strict=True)):
        raise refusal(
            where,
            "a model that calls transformers' attention interface",
            f"{name}, which has an attention of its own",
            "choose another model",
        )
    with _short_windows(model.module):
        single_pass, continued = _outputs(model, rows[-1:]), _outputs_in_pieces(model, rows[-1])
    if not _close(model, single_pass, continued):
        expected = "a model that continues from cached keys and values, and from recurrent states"
        raise refusal(
            where, expected, f"{name}, whose logits differ when it continues from its cache", "choose another model"
        )
    rowwise = None if model.library is None else model.library.rowwise
    unknown = sorted(rowwise.unknown) if rowwise else []
    pairs = [(single_pass, continued), *zip(alone, packed, strict=True)]
    if not exact or (not unknown and all(torch.equal(a, b) for a, b in pairs)):
        if model.library is not None and rowwise and not rowwise.replaced:
            model.library.rowwise = None  # not needed, and slow
        elif rowwise:
            rowwise.is_proven = True
        return
    culprit = f"; what is not known to go row by row: {', '.join(unknown[:3])}" if unknown else ""
    expected = "a model whose rows do not depend on the batch"
    given = f"{name}, whose logits {'may' if unknown else 'do'}{culprit}"
    raise refusal(where, expected, given, 'set numerics = "fast" for this model')


@contextmanager
def _short_windows(module: PreTrainedModel) -> Iterator[None]:
    """Shorten sliding windows below the length of the test sequences: a model may apply a window that it does not pass
    to the attention interface."""
    holders: list[Any] = [module.config.get_text_config(), *module.modules()]
    before = [(holder, window) for holder in holders if (window := getattr(holder, "sliding_window", None))]
    try:
        for holder, window in before:
            holder.sliding_window = min(WINDOW, window)
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


def _find_logits(model: CausalModel, row: torch.Tensor, wanted: torch.Tensor) -> None:
    """Set `logit_scale`, and set `logit_cap` to None if no logits match with it. The same config name means a factor in
    one model and a divisor in another, and a multimodal model may omit the cap of its text model."""
    if model.is_scalar:
        return
    text, scales = model.config.get_text_config(), [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(text, name, None)
        scales += [float(value), 1.0 / float(value)] if value else []
    for model.logit_cap in dict.fromkeys((model.logit_cap, None)):  # noqa: B020
        outputs = []
        for model.logit_scale in scales:
            outputs.append(_outputs(model, [row]))
        distances = [_distance(one, wanted) for one in outputs]
        best = distances.index(min(distances))
        model.logit_scale = scales[best]
        if _close(model, outputs[best], wanted):
            return


def _outputs(model: CausalModel, rows: list[torch.Tensor]) -> torch.Tensor:
    """Compute logits; for a scalar head, which may still be zero, the hidden states that it reads."""
    positions = torch.cat([torch.arange(len(row), device=model.device) for row in rows])
    hidden = model.hidden(torch.cat(rows), positions, Packed.of([len(row) for row in rows]).to(model.device))
    return hidden if model.is_scalar else model.logits(hidden)


def _outputs_in_pieces(model: CausalModel, row: torch.Tensor) -> torch.Tensor:
    """Compute `_outputs` of one sequence in three pieces, the last of one token, continuing from pages and states."""
    num_pages, device = -(-len(row) // BLOCK), model.device
    transposed, states = ops.transposes_keys(device), RecurrentStates(model.recurrent, 1)
    pages = ops.KvPages(model.kv_heads, num_pages=num_pages, dtype=model.dtype, device=device, transposed=transposed)
    table, slots = torch.arange(num_pages, dtype=torch.int32, device=device)[None], torch.zeros(1, dtype=torch.int64)
    outputs = []
    for begin, end in pairwise((0, len(row) // 2, len(row) - 1, len(row))):
        offsets, ends = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, end - begin], [end]))
        paged = Paged(pages, ops.PagedRows(table, offsets, ends), (states, slots.to(device)))
        hidden = model.hidden(row[begin:end], torch.arange(begin, end, device=device), paged)
        outputs.append(hidden if model.is_scalar else model.logits(hidden))
    return torch.cat(outputs)


def _library_outputs(model: CausalModel, row: torch.Tensor) -> torch.Tensor:
    module = model.module
    module.set_attn_implementation("eager")
    outputs: torch.Tensor
    if model.is_scalar:
        outputs = module.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0]
    else:
        outputs = module(input_ids=row[None], use_cache=False).logits[0]
    module.set_attn_implementation(IMPLEMENTATION)
    return outputs.float()


def _close(model: CausalModel, a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    return _distance(a, b) <= tolerance * float(b.float().std())


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().mean())
