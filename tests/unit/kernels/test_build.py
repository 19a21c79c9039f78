"""The compiled library: built once, found again, and the same bits from every vector unit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusals import refused_at

from sparring.errors import BadInput
from sparring.kernels import ops
from sparring.kernels.compiled.build import FLAGS, SOFTWARE_PAIRS, SOFTWARE_TILES, build, load
from sparring.kernels.compiled.library import Library
from sparring.kernels.compiled.path import CompiledPath
from sparring.kernels.paths import SETTINGS


def test_a_second_build_finds_the_first() -> None:
    first = build()
    assert first is not None
    stamp = first.stat().st_mtime_ns
    assert build() == first
    assert first.stat().st_mtime_ns == stamp


COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
for output; do :; done
printf 'half of ' > "$output"
touch "$MET/$PPID"
until [ "$(ls "$MET" | wc -l)" = 2 ]; do :; done
basename "$output" >> "$output"
"""


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Neither ends before both have begun, with a compiler that waits for that; nothing but one whole library is
    left."""
    compiler, met, cache = tmp_path / "compiler", tmp_path / "met", tmp_path / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    met.mkdir()
    environment = {**os.environ, "CXX": str(compiler), "MET": str(met), "SPARRING_CACHE": str(cache)}
    command = [sys.executable, "-m", "sparring.kernels.compiled.build"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate(timeout=60)[0].strip() for process in both}
    (library,) = cache.iterdir()
    assert said == {str(library)} and library.read_text() == "half of kernels.so\n"


def test_the_library_brings_no_openmp_runtime_of_its_own() -> None:
    path = build()
    assert path is not None
    needed = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert "libgomp" not in needed
    load(path)
    loaded = {
        Path(line.split()[-1]).resolve()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line
    }
    assert len(loaded) <= 1


@pytest.mark.full
def test_avx2_gives_the_bits_of_the_native_build() -> None:
    """The fallback for processors without AVX-512, less optimised too, run here: every kernel, bit by bit."""
    wide = build()
    narrow = build(tuple({"-march=native": "-march=haswell", "-O3": "-O1"}.get(flag, flag) for flag in FLAGS))
    assert wide is not None and narrow is not None and wide != narrow
    assert outcomes(CompiledPath(Library(load(wide)), "exact-kernels")) == outcomes(
        CompiledPath(Library(load(narrow)), "exact-kernels")
    )


def outcomes(path: CompiledPath) -> dict[str, list[float]]:
    """Every forward kernel on fixed random input."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, y, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((19, 72), (19, 72), (72,)))
        matrix = torch.randn(100, 72, generator=generator).to(dtype)
        q, k, v = (torch.randn(40, heads, 48, generator=generator).to(dtype) for heads in (4, 2, 2))
        logits = torch.randn(19, 1500, generator=generator)
        cu_seqlens = torch.tensor([0, 33, 40], dtype=torch.int32)
        pages = (
            torch.randn(3, 2, 1, 48, 16, generator=generator).to(dtype),
            torch.randn(3, 2, 16, 48, generator=generator).to(dtype),
        )
        rows = tuple(torch.tensor(r, dtype=torch.int32) for r in ([[0, 1], [2, 0]], [0, 1, 2], [21, 9]))
        form, sinks = ops.AttentionForm(0.2), torch.randn(4, generator=generator)
        bent = ops.AttentionForm(0.2, window=7, cap=1.5)
        found |= {
            f"linear {dtype}": path.linear(x, path.pack([matrix], None), None, 100, dtype),
            f"rms_norm {dtype}": path.rms_norm(x, weight, 1e-6),
            f"silu_mul {dtype}": path.silu_mul(x, y),
            f"rope {dtype}": path.rope(q, k[:, 0].contiguous(), v[:, 0].contiguous(), False),
            f"attention of single rows {dtype}": path.attention_paged(q[:2], k[:2], v[:2], pages, rows, form)[0],
            f"attention {dtype}": path.attention_packed(q, k, v, cu_seqlens, form)[0],
            f"bent attention of single rows {dtype}": path.attention_paged(
                q[:2], k[:2], v[:2], pages, rows, bent, sinks
            )[0],
            f"bent attention {dtype}": path.attention_packed(q, k, v, cu_seqlens, bent, None, sinks)[0],
            f"logprobs {dtype}": path.token_logprobs(logits, torch.arange(19), torch.full((19,), 0.7))[0][0],
        }
    return {name: value.flatten().tolist() for name, value in found.items()}


PROGRAM = """
import sys
from sparring.kernels import ops
print(ops.path_name(), *(ops.path_names(software=True) if "software" in sys.argv else ()))
"""


def choose_path(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that chooses its path by the environment and says which; with the word "software", which it can compute
    in software, too, whose kernels it compiles."""
    own = {name: value for name, value in os.environ.items() if name != "SPARRING_KERNELS"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], env={**own, **environment}, capture_output=True, text=True, check=False
    )


def test_the_environment_chooses_the_path(kernel_path: str) -> None:
    (word,) = (word for word, name in SETTINGS.items() if name == kernel_path)
    assert choose_path(SPARRING_KERNELS=word).stdout.strip() == kernel_path


def test_the_default_path_is_the_best_that_needs_no_emulation() -> None:
    assert choose_path().stdout.strip() == ops.path_names()[0]


OLDER = """#!/bin/sh
exec g++ "$@" -march=haswell -O0
"""


@pytest.mark.slow
def test_a_path_without_its_instructions_is_refused_by_name(tmp_path: Path) -> None:
    """A compiler that builds for one without AVX-512, to which the compiled library's own answers belong."""
    compiler = tmp_path / "compiler"
    compiler.write_text(OLDER)
    compiler.chmod(0o755)
    older = {"CXX": str(compiler), "SPARRING_CACHE": str(tmp_path / "cache")}
    assert choose_path("software", **older).stdout.split() == [
        "exact-kernels",
        "exact-pairs",
        "exact-kernels",
        "exact-torch",
    ]
    assert choose_path(**older, SPARRING_KERNELS="pairs").stdout.strip() == "exact-pairs"
    refused = choose_path(**older, SPARRING_KERNELS="tiles")
    because = "the processor has no AMX tiles, nor what computes them in software (AVX512_BF16)"
    expected = f"SPARRING_KERNELS=tiles: expected a path that this machine computes (exact-kernels, exact-torch), got exact-tiles: {because}"
    assert refused.returncode == 1 and expected in refused.stderr


@pytest.mark.kernel_paths("exact-tiles")
def test_tiles_add_in_the_order_of_the_manual(path: str) -> None:
    """In each block of 32 inputs a chain of the even products and one of the odd, added to each other and then to the
    sum."""
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in ((1, 37, 70), (33, 331, 130), (70, 64, 1)):
        x, weight = (torch.randn(count, inputs, generator=generator).bfloat16() for count in (rows, outputs))
        expected = torch.zeros(rows, outputs)
        for begin in range(0, inputs, 32):
            chains = [torch.zeros(rows, outputs), torch.zeros(rows, outputs)]
            for k in range(begin, min(begin + 32, inputs)):
                chains[k % 2] = chains[k % 2] + x[:, k : k + 1].float() * weight[:, k].float()
            expected = expected + (chains[0] + chains[1])
        assert torch.equal(ops.linear(x, ops.pack(weight), None, torch.float32), expected)
        wide = ops.linear(x.float(), ops.pack(weight.float()))
        assert torch.allclose(wide.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.kernel_paths("exact-tiles", "exact-pairs", hardware=True)
def test_software_has_the_bits_of_the_hardware(path: str) -> None:
    hardware, software = (
        Library(load(build(flags)))
        for flags in (FLAGS, {"exact-tiles": SOFTWARE_TILES, "exact-pairs": SOFTWARE_PAIRS}[path])
    )
    assert outcomes(CompiledPath(hardware, path)) == outcomes(CompiledPath(software, path))


def test_an_unknown_path_is_refused() -> None:
    with refused_at("numerics path", "exact-magic: there is none of that name"):
        ops.use("exact-magic")
    with refused_at("numerics path", "exact-device: it computes on a GPU"):
        ops.use("exact-device")


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = ops.pack(torch.zeros(4, 8))
    with pytest.raises(BadInput, match="linear"):
        ops.linear(torch.zeros(2, 9), packed)
    with pytest.raises(BadInput, match="linear"):
        ops.linear(torch.zeros(2, 8, dtype=torch.bfloat16), packed)
    with pytest.raises(BadInput, match="pack"):
        ops.pack(torch.zeros(4, 8, dtype=torch.float16))
    with pytest.raises(BadInput, match="pack it anew"):
        packed.update(torch.zeros(4, 9))
    with pytest.raises(BadInput, match="rms_norm"):
        ops.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-6)
    with pytest.raises(BadInput, match="rope"):
        ops.rope(torch.zeros(2, 1, 8), torch.zeros(2, 7), torch.zeros(2, 7))
    with pytest.raises(BadInput, match="cu_seqlens"):
        ops.attention_packed(
            *(torch.zeros(4, 1, 16),) * 3, torch.tensor([0, 5], dtype=torch.int32), ops.AttentionForm(1.0)
        )
