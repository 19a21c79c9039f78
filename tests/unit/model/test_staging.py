"""StagedWeights weights give the bits of loaded ones, touch nothing before they are committed, and go back without a trace."""

import json

import pytest
import torch
from suite import short_of

from sparring.errors import WeightsError
from sparring.kernels.compiled.library import COMPILED
from sparring.model.attention import Packed
from sparring.model.layers import RowConv1D
from sparring.model.load import load as load_model
from sparring.model.staging import StagedWeights
from sparring.testing.tiny_models import FEATURES, VOCABULARY, tiny_model

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]

RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")
TOKENS = torch.arange(30) * 7 % VOCABULARY


def load(path, dtype="float32"):
    """In exact numerics where these serve it."""
    kind = json.loads((path / "config.json").read_text())["model_type"]
    return load_model(path, dtype=dtype, numerics="fast" if kind in RECURRENT else "exact")


def logits(model):
    with torch.inference_mode():
        return model.logits(model.hidden(TOKENS, torch.arange(len(TOKENS)), Packed.of([len(TOKENS)])))


# where the library's layers compute them, fast numerics promise no bits
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.kernel_paths(*COMPILED)] * (name in RECURRENT))
    for name in ("llama", *FEATURES)
]


@pytest.fixture(scope="module", params=FAMILIES)
def paths(request, tmp_path_factory):
    """Two checkpoints of one shape."""
    folder = tmp_path_factory.mktemp(request.param)
    return [tiny_model(request.param, folder / str(seed), seed=seed) for seed in range(2)]


@pytest.mark.parametrize(
    ("dtype", "used"),
    short_of(
        [(dtype, used) for dtype in ("float32", "bfloat16") for used in (True, False)],
        [("float32", True), ("bfloat16", False)],
    ),
)
def test_committed_weights_are_loaded_weights(paths, dtype, used):
    model, other = (load(path, dtype=dtype) for path in paths)
    before, after = (logits(load(path, dtype=dtype)) for path in paths)
    if used:
        logits(model)
    staged = StagedWeights(model, load(paths[1]).state())
    for tensor in other.state().values():
        tensor.zero_()
    assert torch.equal(logits(model), before)
    for in_place in (False, True):
        with torch.inference_mode():
            staged.commit(in_place=in_place)
        assert torch.equal(logits(model), after) and not torch.equal(before, after)
        staged.undo()
        assert torch.equal(logits(model), before)


def test_committed_weights_leave_nothing_of_the_old_ones(tmp_path):
    """A packed weight that is a view of a parameter, as GPT-2's, views the new one."""
    one, other = (tiny_model("gpt2", tmp_path / str(seed), seed=seed) for seed in range(2))
    model = load(one)
    logits(model)
    StagedWeights(model, load(other).state()).commit()
    for part in (part for part in model.parts if isinstance(part, RowConv1D)):
        assert part.product.packed.weights[0].data_ptr() == part.weight.data_ptr()


def test_weights_that_do_not_fit_are_not_staged(paths):
    model = load(paths[0])
    state = model.state()
    name = next(iter(state))
    for wrong in ({k: v for k, v in state.items() if k != name}, {**state, name: state[name][:-1]}):
        with pytest.raises(WeightsError):
            StagedWeights(model, wrong)


def test_a_commit_that_fails_half_way_is_undone(paths):
    """As for a device that is lost between two parameters: the last of them takes no value."""

    class Lost:
        @property
        def data(self):
            return None

        @data.setter
        def data(self, value):
            raise RuntimeError("the device is lost")

    model = load(paths[0])
    before = logits(model)
    staged = StagedWeights(model, load(paths[1]).state())
    staged._new.insert(len(staged._new) // 2, (Lost(), "data", None))
    with pytest.raises(RuntimeError):
        staged.commit()
    staged.undo()
    assert torch.equal(logits(model), before)
