"""Helpers ask for memory while the process that will need it imports; what they leave behind is nothing but free
memory."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.engine.config import EngineConfig
from sparring.errors import BadInput
from sparring.generation import GenerateRequest, Sampling
from sparring.launch import room as room_module
from sparring.launch.room import cores, free, left_in, room, shares_in
from sparring.launch.start import start_engine, weight_bytes
from sparring.testing.tiny_models import tiny_model

MIB = 1 << 20


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_helpers_are_there_within_and_gone_behind():
    before = children()
    with room(64 * MIB):
        helpers = set(children()) - set(before)
        assert len(helpers) == min(room_module.MOST_HELPERS, cores() - 1)
    assert children() == before
    with pytest.raises(ZeroDivisionError), room(64 * MIB):
        raise ZeroDivisionError
    assert children() == before


@pytest.mark.parametrize("size", [0, -1, 1 << 60])
def test_nobody_asks_for_nothing_nor_for_more_than_there_is(size):
    before = children()
    with room(size):
        assert children() == before


def test_a_helper_writes_what_it_is_told_and_leaves_with_its_parent():
    command = [sys.executable, "-I", "-S", room_module.__file__, str(64 * MIB)]
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL)\n"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    found = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    code, most = map(int, found.stdout.split())
    assert code == 0 and 64 << 10 <= most < 128 << 10


def test_free_memory_is_some_of_the_machines():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free() < total


def test_the_weights_are_counted_in_the_engines_dtype(tmp_path):
    path = tiny_model("qwen3", tmp_path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert weight_bytes(path, "float32") == int(1.1 * size)
    assert weight_bytes(path, "bfloat16") == int(1.1 * size / 4 * 2)
    assert weight_bytes(tmp_path / "nowhere", "float32") == 0
    (path / "config.json").write_text("[]")
    assert weight_bytes(path, "float32") == 0


def test_groups_bound_what_is_free(tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    assert left_in(inner) == []
    for group, most, current in ((inner, "max", 7), (inner.parent, "1000", 300)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{current}\n")
    assert left_in(inner) == [700]
    (inner / "memory.limit_in_bytes").write_text("50\n")  # of the first version
    (inner / "memory.usage_in_bytes").write_text("20\n")
    assert left_in(inner) == [30, 700]


def test_quotas_bound_the_cores(tmp_path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert shares_in(inner) == [1.5]
    assert 1 <= cores() <= len(os.sched_getaffinity(0))


def test_an_engine_is_started_from_a_folder_and_refused_without_one(tmp_path):
    options = {"dtype": "float32", "numerics": "exact", "engine": EngineConfig(max_running=2), "threads": 1}
    engine = start_engine(tiny_model("qwen3", tmp_path / "model"), **options)

    async def ask():
        answer = await engine.generate(GenerateRequest(id="1", tokens=(3, 4), sampling=Sampling(max_tokens=3)))
        await engine.close()
        return answer

    assert len(asyncio.run(ask()).tokens) == 3
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"no such kind"'))
    before = children()
    with pytest.raises(BadInput, match="no such kind"):
        start_engine(tmp_path / "model", **options)
    assert children() == before
