"""Weights in shared memory: copied on both sides, verified, and gone with their publisher."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sparring.errors import WeightsError
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.inline import reference
from sparring.weights.shared_memory import FOLDER, published


def make_state():
    return {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "b": torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.int64),
        "d": torch.zeros(0, 4),
    }


def test_fetched_weights_are_bitwise_the_published_ones():
    state = make_state()
    with published(reference("policy", 3, state, ((1, 2), (-0.5,)))) as ref:
        got = fetch(ref)
    assert (ref.model, ref.version, ref.transport, ref.probe) == ("policy", 3, "shared_memory", ((1, 2), (-0.5,)))
    assert list(got) == list(state)
    for name, tensor in state.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            got[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )


def test_trainer_and_engine_share_no_storage():
    state = make_state()
    with published(reference("policy", 3, state)) as ref:
        state["a"].zero_()
        got, again = fetch(ref), fetch(ref)
        got["a"].zero_()
        assert torch.equal(again["a"], torch.arange(6.0).reshape(2, 3).t())


def test_the_reference_crosses_as_json():
    with published(reference("policy", 3, make_state())) as ref:
        sent = json.loads(json.dumps(ref.location))
        assert torch.equal(fetch(replace(ref, location=sent))["c"], torch.tensor(7))


def test_a_segment_is_removed_when_its_context_ends():
    with pytest.raises(KeyError), published(reference("policy", 3, make_state())) as ref:
        assert (FOLDER / ref.location["segment"]).stat().st_mode & 0o777 == 0o600
        raise KeyError
    assert not (FOLDER / ref.location["segment"]).exists()
    with pytest.raises(WeightsError, match="its publisher has removed it"):
        fetch(ref)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"segment": "sparring-weights-../../etc/passwd"}, "expected a segment sparring-weights-"),
        ({"size": 17}, "expected a file of 17 bytes"),
        ({"tensors": {"a": {"dtype": "float32", "shape": [2, 3], "offset": 1 << 40}}}, "tensors within their block"),
        ({"tensors": {"a": {"dtype": "float32", "shape": [-1, -1], "offset": 8}}}, "tensors within their block"),
        ({"tensors": {"a": {"dtype": "no_such", "shape": [2, 3], "offset": 0}}}, "tensors within their block"),
        ({"tensors": {"a": {"dtype": "float32", "shape": [3, 2], "offset": 0}}}, "checksum"),
        ({"tensors": 3}, "a location in shared memory"),
    ],
)
def test_a_wrong_reference_is_refused(how, said):
    with published(reference("policy", 3, make_state())) as ref, pytest.raises(WeightsError, match=said):
        fetch(replace(ref, location={**ref.location, **how}))


def test_a_flipped_bit_is_found():
    with published(reference("policy", 3, make_state())) as ref:
        with open(FOLDER / ref.location["segment"], "r+b") as file:
            file.write(b"\x01")
        with pytest.raises(WeightsError, match="checksum"):
            fetch(ref)


SWEPT = """
import os, signal, torch
from sparring.weights.shared_memory import FOLDER, PREFIX, published, sweep
from sparring.weights.inline import reference

told, tell = os.pipe()
other = os.fork()
if other == 0:
    with published(reference("policy", 1, {"a": torch.ones(3)})) as ref:
        os.write(tell, ref.location["segment"].encode())
        signal.pause()
path = FOLDER / os.read(told, 100).decode()
sweep()
assert path.name.startswith(f"{PREFIX}{other}-") and path.exists()
os.kill(other, signal.SIGKILL)
os.waitpid(other, 0)
assert path.exists()
with published(reference("policy", 2, {"a": torch.ones(3)})) as ref:
    sweep()
    assert not path.exists() and (FOLDER / ref.location["segment"]).exists()
"""


def test_sweep_removes_files_of_dead_publishers_only():
    """With a shared memory of its own: any other publisher of this machine would sweep too."""
    alone = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", "/dev/shm", "--unshare-pid", "--proc", "/proc"]
    done = subprocess.run([*alone, sys.executable, "-c", SWEPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_full_shared_memory_is_reported():
    enormous = torch.zeros(1).expand(1 << 44)
    ref = WeightRef(model="policy", version=1, checksum="", transport="inline", location={"a": enormous})
    with pytest.raises(WeightsError, match="free bytes in /dev/shm"), published(ref):
        pass
