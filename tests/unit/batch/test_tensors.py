"""The worked example of `types.Sample`, laid out."""

from dataclasses import replace

import pytest
import torch

from sparring.batch.demonstration import demonstration, demonstration_batch
from sparring.batch.denominators import denominators
from sparring.batch.tensors import micro_batch
from sparring.errors import BadInput, SparringError
from sparring.generation import KeptSets
from sparring.types import Sample

EXAMPLE = Sample(
    id="x#0",
    group="g",
    source="policy",
    tokens=(10, 11, 20, 21, 30, 22, 31),
    weights={"policy": (0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0)},
    logprobs=(0.0, 0.0, -0.3, -1.2, 0.0, -0.7, 0.0),
    advantages=(0.0, 0.0, 0.5, 0.5, 0.0, 0.5, 0.0),
    versions=(-1, -1, 7, 7, -1, 8, -1),
    kv_versions=(-1, -1, 7, 7, -1, 7, -1),
    temperature=0.5,
)
EXPERT = demonstration([5, 6, 7], [False, True, True], "d")


def test_the_worked_example_is_aligned_with_the_positions_that_predict():
    expert = demonstration([5, 6, 7], [False, False, True], "d")
    micro = micro_batch([EXAMPLE, expert], {"policy": 3.0, "imitate": 1.0})
    assert micro.tokens.tolist() == [5, 6, 10, 11, 20, 21, 30], "nothing is computed behind the last weighted token"
    assert micro.positions.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert micro.cu_seqlens.tolist() == [0, 2, 7] and micro.cu_seqlens.dtype == torch.int32
    assert micro.shared.tolist() == [0, 0] and micro.shared.dtype == torch.int32
    assert micro.predicting.tolist() == [3, 4, 6, 1], "weighted tokens come in the order of the rows given"
    assert micro.targets.tolist() == [20, 21, 22, 7]
    assert micro.weights["policy"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert micro.weights["imitate"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert micro.behaviour_logprobs.tolist() == torch.tensor([-0.3, -1.2, -0.7, 0.0]).tolist()
    assert micro.advantages.tolist() == [0.5, 0.5, 0.5, 0.0]
    assert micro.versions.tolist() == [7, 7, 8, -1]
    assert micro.kv_versions.tolist() == [7, 7, 7, -1]
    assert micro.temperature.tolist() == [0.5, 0.5, 0.5, 1.0]


def test_kept_sets_follow_their_tokens():
    """Only of the weighted tokens; a row without any beside it, and a token that was drawn from everything."""
    kept = KeptSets.of([[], [], [9, 20, 3], [21], [], [], []])
    micro = micro_batch([EXPERT, replace(EXAMPLE, kept=kept)], {"policy": 3.0, "imitate": 2.0})
    assert micro.targets.tolist() == [6, 7, 20, 21, 22]
    offsets, ids = micro.kept
    assert (offsets.tolist(), ids.tolist()) == ([0, 0, 0, 3, 4, 4], [3, 9, 20, 21])
    assert (offsets.dtype, ids.dtype) == (torch.int64, torch.int32)
    assert micro_batch([EXAMPLE], {"policy": 3.0}).kept is None
    with pytest.raises(ValueError, match="1 kept sets for 7 tokens"):
        replace(EXAMPLE, kept=KeptSets.of([[1]]))


def test_logit_biases_follow_their_tokens():
    bias = ((), (), ((9, -float("inf")), (3, 0.5)), ((3, 0.5),), (), (), ())
    micro = micro_batch([EXPERT, replace(EXAMPLE, bias=bias)], {"policy": 3.0, "imitate": 2.0})
    offsets, ids, values = micro.bias
    assert (offsets.tolist(), ids.tolist()) == ([0, 0, 0, 2, 3, 3], [9, 3, 3])
    assert values.tolist() == [-float("inf"), 0.5, 0.5]
    assert (offsets.dtype, ids.dtype, values.dtype) == (torch.int64, torch.int64, torch.float32)
    assert micro_batch([EXAMPLE], {"policy": 3.0}).bias is None
    with pytest.raises(ValueError, match="1 biases for 7 tokens"):
        replace(EXAMPLE, bias=((),))


def test_a_shared_prefix_is_stored_once_and_rows_keep_their_weights():
    rows = [
        demonstration([1, 2, 3, 4], [False, False, True, True], "a"),
        demonstration([1, 2, 5, 6], [False, False, True, True], "b"),
        demonstration([1, 2, 3, 4], [False, False, True, True], "a again"),
    ]
    micro = micro_batch(rows, denominators(rows))
    assert micro.tokens.tolist() == [1, 2, 3, 5]
    assert micro.positions.tolist() == [0, 1, 2, 2]
    assert (micro.cu_seqlens.tolist(), micro.shared.tolist()) == ([0, 3, 3, 4], [0, 3, 2])
    assert micro.targets.tolist() == [3, 4, 5, 6, 3, 4]
    assert micro.predicting.tolist() == [1, 2, 1, 3, 1, 2]
    assert micro.weights["imitate"].tolist() == [1.0] * 6 and micro.denominators == {"imitate": 6.0}


def test_tokens_without_advantage_are_not_computed():
    row = Sample(
        id="x#0",
        group="g",
        source="policy",
        tokens=(1, 2, 3),
        weights={"policy": (0.0, 1.0, 1.0)},
        advantages=(0.0, 0.5, 0.0),
        annotations={"reference": (0.0, -1.0, -2.0)},
    )
    micro = micro_batch([row], denominators([row]))
    assert micro.targets.tolist() == [2] and micro.tokens.tolist() == [1]
    assert micro.denominators == {"policy": 2.0}
    assert micro.annotations["reference"].tolist() == [-1.0]


def test_rows_that_carry_different_annotations_are_refused():
    """A column that some rows lack has no values for them; to leave it out would change what the others are trained
    on."""
    told = replace(EXAMPLE, annotations={"proximal": (0.0,) * 7, "reference": (0.0,) * 7})
    silent = replace(EXAMPLE, id="y#0", annotations={"reference": (0.0,) * 7})
    said = "row y#0: expected the annotations of row x#0"
    with pytest.raises(SparringError, match=said):
        micro_batch([told, told, silent], {"policy": 9.0})
    assert sorted(micro_batch([told, told], {"policy": 6.0}).annotations) == ["proximal", "reference"]


def test_rows_without_weight_give_empty_tensors():
    row = Sample(id="x", group="g", source="policy", tokens=(1, 2), weights={"policy": (0.0, 0.0)})
    micro = micro_batch([row], {"policy": 1.0})
    assert [len(t) for t in (micro.tokens, micro.targets, micro.weights["policy"])] == [0, 0, 0]
    assert (micro.cu_seqlens.tolist(), micro.shared.tolist()) == ([0], [])


def test_denominators_are_the_sum_of_weights():
    rows = [demonstration([1, 2, 3], [False, True, True], "a"), EXAMPLE]
    assert denominators(rows) == {"imitate": 2.0, "policy": 3.0}
    assert denominators([*rows, replace(EXAMPLE, label=0.0)]) == denominators(rows), "it is judged, not trained"
    assert demonstration_batch(rows[:1], step=4, model="policy").denominators == {"imitate": 2.0}
    with pytest.raises(ValueError, match="got a sum of 0 or less"):
        denominators([Sample(id="a", group="g", source="expert", tokens=(1, 2), weights={"imitate": (0.0, -1.0)})])


@pytest.mark.parametrize(
    ("tokens", "marks", "message"),
    [
        ([1, 2], [True], "mark every"),
        ([1, 2], [False, False], "assistant"),
        ([1, 2], [True, True], "prompt token first"),
    ],
)
def test_a_demonstration_that_cannot_be_learned_is_refused(tokens, marks, message):
    with pytest.raises(BadInput, match=message):
        demonstration(tokens, marks, "d")
