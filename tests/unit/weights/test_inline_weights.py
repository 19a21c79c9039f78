"""Publishing copies; fetching verifies."""

from dataclasses import replace

import pytest
import torch

from sparring.errors import WeightsError
from sparring.weights.checksum import checksum
from sparring.weights.inline import fetch, publish


def make_state():
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, -0.0], dtype=torch.bfloat16)}


def test_a_published_version_is_a_copy():
    state = make_state()
    ref = publish("policy", 3, state, ((1, 2), (-0.5,)))
    state["a"].add_(1.0)
    got = fetch(ref)
    assert torch.equal(got["a"], torch.arange(6.0).reshape(2, 3))
    assert got["b"].dtype == torch.bfloat16
    assert (ref.model, ref.version, ref.transport, ref.probe) == ("policy", 3, "inline", ((1, 2), (-0.5,)))


def test_a_damaged_or_foreign_reference_is_refused():
    ref = publish("policy", 1, make_state())
    ref.location["a"][0, 0] = torch.nextafter(ref.location["a"][0, 0], torch.tensor(1.0))
    with pytest.raises(WeightsError, match="checksum"):
        fetch(ref)
    with pytest.raises(WeightsError, match="transport"):
        fetch(replace(ref, transport="disk"))


def test_checksum_sees_names_shapes_dtypes_and_bits_and_not_order_or_layout():
    state = make_state()
    base = checksum(state)
    assert checksum(dict(reversed(state.items()))) == base
    assert checksum({**state, "a": state["a"].t().contiguous().t()}) == base
    changed = [
        {"a": state["a"], "c": state["b"]},
        {**state, "a": state["a"].reshape(3, 2)},
        {**state, "a": state["a"].view(torch.int32)},
        {**state, "b": state["b"].abs()},
        {"a": state["a"]},
    ]
    assert len({base, *map(checksum, changed)}) == len(changed) + 1
