"""Engine processes of a run that are vLLM's: started with it, started again when one dies, and ended with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from test_vllm_process import check_ended, children, processes, watched
from test_vllm_served import SPARRING, VLLM, recipe

pytestmark = pytest.mark.vllm

LOCAL = ("cluster.kind=local", "cluster.engines=2", "cluster.engine_threads=1", "engine.silent_s=5")


def arguments(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")


def test_a_run_whose_engine_processes_are_vllms(tmp_path: Path) -> None:
    settings = ('run.stages=["init", "rl"]', "rl.steps=6", "observe.lines_every_s=0", *VLLM, *LOCAL)
    output, descriptors = list[str](), list[int]()
    command = (*SPARRING, "run", *recipe(tmp_path, *settings))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl 2/"):
                engines = [child for child in children(run.pid) if b"serve" in arguments(child)]
                assert len(engines) == 2
                vllms = [vllm for engine in engines for vllm in children(engine)]
                descriptors = watched([*engines, *(member for vllm in vllms for member in processes(vllm))])
                os.kill(engines[0], signal.SIGKILL)
        assert run.wait() == 0, "".join(output)
    assert "is left out" in "".join(output)
    check_ended(descriptors)
    lines = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 6 and all(values["logprob_max_abs_diff"] < 1e-3 for values in steps)
