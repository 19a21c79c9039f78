import subprocess
import sys

import pytest

PROGRAM = """
import gc
from sparring.stages.runtime.garbage import fewer_collections

if FROZEN:
    gc.freeze()
for young in (700, 50_000):  # Python's, the program's
    gc.set_threshold(young)
    before = gc.get_threshold()
    with fewer_collections(), fewer_collections():
        assert gc.get_threshold()[0] >= max(young, 20_000)
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert bool(gc.get_freeze_count()) == FROZEN
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_as_before_at_the_end(frozen: bool) -> None:
    """Also where the program around the run has excluded objects of its own."""
    subprocess.run([sys.executable, "-c", PROGRAM.replace("FROZEN", str(frozen))], check=True)
