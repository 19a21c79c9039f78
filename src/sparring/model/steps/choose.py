"""Choice of the implementation of a model's generation steps. All give the same numbers to the bit."""

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
    """Choose the implementation: one compiled call for the Llama family on the compiled kernels, CUDA graphs for that
    family on a GPU, otherwise operation by operation."""
    operations = OperationStep(model, pages, slots, states)
    if model.decoder is None or not isinstance(model.head, RowLinear):
        return operations
    if ops.path_name(model.device) == "exact-device":
        if model.decoder.mixtures:
            return operations  # a graph cannot hold products whose number of rows depends on the routing
        return DeviceStep(model, pages, slots, operations)
    one_call = len(mlp_widths(model.decoder)) <= 1 and all(
        mixture.experts.is_plain for mixture in model.decoder.mixtures
    )
    return DecoderStep(model, pages, slots) if ops.is_compiled(model.device) and one_call else operations
