"""Choice of the way in which a model takes steps of generation. All ways give the same numbers to the bit."""

from __future__ import annotations

from sparring.kernels import ops
from sparring.model.causal import CausalModel
from sparring.model.layers import RowLinear
from sparring.model.states import RecurrentStates
from sparring.model.steps.compiled import DecoderStep, mlp_widths
from sparring.model.steps.device import DeviceStep
from sparring.model.steps.operations import OperationStep
from sparring.model.steps.rows import Slots


def step_of(
    model: CausalModel, pages: ops.KvPages, slots: Slots, states: RecurrentStates | None = None
) -> DecoderStep | DeviceStep | OperationStep:
    """Choose one call where the model is of the Llama family and the compiled kernels are in use; graphs of it on a
    GPU; else operation by operation."""
    operations = OperationStep(model, pages, slots, states)
    if model.decoder is None or not isinstance(model.head, RowLinear):
        return operations
    if ops.path_name(model.device) == "exact-device":
        if model.decoder.mixtures:
            return operations  # a graph holds no product whose rows are counted first
        return DeviceStep(model, pages, slots, operations)
    one_call = len(mlp_widths(model.decoder)) <= 1 and all(
        mixture.experts.is_plain for mixture in model.decoder.mixtures
    )
    return DecoderStep(model, pages, slots) if ops.is_compiled(model.device) and one_call else operations
