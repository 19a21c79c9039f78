"""Weights in shared memory: copied on both sides, verified, and gone with their publisher."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sparring.errors import WeightsError
from sparring.weights.fetch import fetch
from sparring.weights.shared_memory import FOLDER, PREFIX, published, sweep


def make_state():
    return {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "b": torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.int64),
        "d": torch.zeros(0, 4),
    }


def test_what_is_fetched_is_what_was_published_to_the_bit():
    state = make_state()
    with published("policy", 3, state, ((1, 2), (-0.5,))) as ref:
        got = fetch(ref)
    assert (ref.model, ref.version, ref.transport, ref.probe) == ("policy", 3, "shared_memory", ((1, 2), (-0.5,)))
    assert list(got) == list(state)
    for name, tensor in state.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def test_nobody_shares_storage():
    state = make_state()
    with published("policy", 3, state) as ref:
        state["a"].zero_()
        got, again = fetch(ref), fetch(ref)
        got["a"].zero_()
        assert torch.equal(again["a"], torch.arange(6.0).reshape(2, 3).t())


def test_the_reference_crosses_as_json():
    with published("policy", 3, make_state()) as ref:
        sent = json.loads(json.dumps(ref.location))
        assert torch.equal(fetch(replace(ref, location=sent))["c"], torch.tensor(7))


def test_a_segment_is_gone_with_its_context_and_the_reference_says_so():
    with pytest.raises(KeyError), published("policy", 3, make_state()) as ref:
        assert (FOLDER / ref.location["segment"]).stat().st_mode & 0o777 == 0o600
        raise KeyError
    assert not (FOLDER / ref.location["segment"]).exists()
    with pytest.raises(WeightsError, match="its publisher has taken it back or is gone; publish them again"):
        fetch(ref)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"segment": "sparring-weights-../../etc/passwd"}, "expected a segment sparring-weights-"),
        ({"size": 17}, "expected a segment of 17 bytes"),
        ({"tensors": {"a": {"dtype": "float32", "shape": [2, 3], "offset": 1 << 40}}}, "tensors within their segment"),
        ({"tensors": {"a": {"dtype": "float32", "shape": [-1, -1], "offset": 8}}}, "tensors within their segment"),
        ({"tensors": {"a": {"dtype": "no_such", "shape": [2, 3], "offset": 0}}}, "tensors within their segment"),
        ({"tensors": {"a": {"dtype": "float32", "shape": [3, 2], "offset": 0}}}, "checksum"),
        ({"tensors": 3}, "a location in shared memory"),
    ],
)
def test_a_wrong_reference_is_refused(how, said):
    with published("policy", 3, make_state()) as ref, pytest.raises(WeightsError, match=said):
        fetch(replace(ref, location={**ref.location, **how}))


def test_a_flipped_bit_is_found():
    with published("policy", 3, make_state()) as ref:
        with open(FOLDER / ref.location["segment"], "r+b") as file:
            file.write(b"\x01")
        with pytest.raises(WeightsError, match="checksum"):
            fetch(ref)


PUBLISHER = """
import sys, torch
from sparring.weights.shared_memory import published
with published("policy", 1, {"a": torch.ones(3)}) as ref:
    print(ref.location["segment"], flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_publisher_left_is_swept_and_what_a_living_one_lends_is_not():
    with subprocess.Popen([sys.executable, "-c", PUBLISHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        path = FOLDER / other.stdout.readline().strip()
        sweep()
        assert path.name.startswith(PREFIX) and path.exists()
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert path.exists()
        with published("policy", 2, make_state()) as ref:
            sweep()
            assert not path.exists() and (FOLDER / ref.location["segment"]).exists()


def test_no_room_is_said():
    enormous = torch.zeros(1).expand(1 << 44)
    with pytest.raises(WeightsError, match=r"bytes of /dev/shm, got OSError: .*; make room there"), published("policy", 1, {"a": enormous}):
        pass
