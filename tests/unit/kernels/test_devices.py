"""Which device a setting means on this machine, and which GPU each engine process gets."""

import os
import subprocess
import sys

import pytest

from sparring.errors import BadInput
from sparring.kernels.devices import VISIBLE, gpu_count, gpu_of, resolve_device


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_is_not_there_is_refused_or_not_taken(wanted):
    if gpu_count():
        assert resolve_device(wanted, "run.device") == "cuda"
    elif wanted == "auto":
        assert resolve_device(wanted, "run.device") == "cpu"
    else:
        with pytest.raises(BadInput) as refused:
            resolve_device(wanted, "run.device")
        assert refused.value.where == "run.device"
    assert resolve_device("cpu", "run.device") == "cpu"


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 1, ["0", "0", "0"]),
        (None, 4, ["1", "2", "3", "1"]),
        ("5,7,2", 3, ["7", "2", "7"]),
        ("GPU-4f,GPU-9a", 2, ["GPU-9a", "GPU-9a"]),
        ("6", 1, ["6", "6"]),
    ],
)
def test_engines_have_the_gpus_that_the_run_does_not_compute_on(visible, count, expected):
    """In a process of its own: the variable is the process's."""
    code = f"from sparring.kernels.devices import gpu_of; print(*(gpu_of(n, {count}) for n in range({len(expected)})))"
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    environment |= {VISIBLE: visible} if visible else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


def test_more_engines_than_gpus_share_them():
    assert [gpu_of(number, 2) for number in range(3)] == [gpu_of(0, 2)] * 3
