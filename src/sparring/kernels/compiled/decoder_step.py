"""C structures of generation steps in ctypes; they mirror the structs in decoder.cpp and adapters.h.

Shapes: L layers, D width, H query heads, G key/value heads, d head size, I width of the MLP, E experts, k experts per
row, V vocabulary, B sequences, N new rows.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p

from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.compiled.library import Weight

STOPS, BIASES, TOPS = 8, 512, 20
"""Entries per slot: stop tokens, biased tokens, and most likely tokens to return."""

WEIGHTS = 4
"""Weights of a layer that adapters may add to: qkv, o, gate_up, down."""

SLOT_COLUMNS = (
    *("tables", "temperature", "top_p", "min_p", "top_k", "seeds", "stops"),
    *("bias_ids", "bias_values", "bias_counts", "bias_until", "limited", "allowed", "tops", "adapters"),
)
"""Arrays by slot, in the order in which the kernels read them."""


class AttentionPlan(Structure):
    """An `AttentionForm` as a C structure. Sinks have no field: no model of the Llama family has them."""

    _fields_ = [("scale", c_float), ("cap", c_float), ("window", c_int64), ("sinks", c_void_p)]

    @staticmethod
    def of(form: AttentionForm) -> AttentionPlan:
        """Convert `form` to the structure that the compiled kernels read."""
        return AttentionPlan(*form.numbers, None)


class LayerPlan(Structure):
    """One decoder layer; q_norm and k_norm may be null. A layer with one MLP has a `router` without outputs. In a
    mixture, `router` is [E, D], gate_up and down point to the first of E experts, and a row uses `chosen` experts."""

    _fields_ = [
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down", "router")),
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm", "keys", "values")),
        *((name, c_float) for name in ("input_eps", "q_eps", "k_eps", "mlp_eps")),
        ("form", AttentionPlan),
        ("chosen", c_int64),
        ("renormalised", c_int64),
    ]


class DeltaPlan(Structure):
    """Term that an adapter adds to a product: scale * B (A x); absent if `b` has no outputs. For experts, the term of
    the first expert."""

    _fields_ = [("a", Weight), ("b", Weight), ("scale", c_float)]


class DecoderPlan(Structure):
    """A model with its pages, and the settings of the running requests by slot."""

    _fields_ = [
        ("layers", c_void_p),
        ("head", Weight),
        *((name, c_void_p) for name in ("embedding", "norm", "cos", "sin")),
        *((name, c_int64) for name in ("num_layers", "D", "H", "G", "d", "V", "max_positions", "I", "E", "k")),
        *((name, c_int64) for name in ("page_size", "num_pages", "pages_per_table")),
        *((name, c_void_p) for name in SLOT_COLUMNS),
        ("eps", c_float),
    ]


class StepPlan(Structure):
    """New rows of B sequences. For each sequence that samples, `sampled` and `logprobs` receive `counts` tokens, at
    most `steps`; `kept` receives the masks of their kept sets (see `truncation.py`) and `top_ids` the most likely
    tokens; `kept` and `top_ids` may be null. `deltas` [adapter][L][4] are the terms of qkv, o, gate_up and down; null
    without adapters."""

    _fields_ = [
        *((name, c_void_p) for name in ("slots", "cu_rows", "lengths", "tokens", "samples")),
        ("B", c_int64),
        ("independent", c_int64),
        ("steps", c_int64),
        *(
            (name, c_void_p)
            for name in ("interrupt", "sampled", "logprobs", "counts", "top_ids", "top_logprobs", "kept")
        ),
        ("threads", c_int64),
        ("deltas", c_void_p),
    ]
