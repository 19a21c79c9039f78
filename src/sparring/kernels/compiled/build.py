"""Build of the kernels, once per machine. `python -m sparring.kernels.compiled.build` builds and prints the path.

The library is cached in SPARRING_CACHE (default ~/.cache/sparring) under a hash of sources, flags, compiler and CPU,
and renamed into place, so two processes may build at once. It has its own threads (parallel.h); the number of threads
is an argument of each call, for which callers pass `torch.get_num_threads()`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparring.scratch import scratch

FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-pthread", "-fPIC", "-Wno-psabi")
"""Compiler flags. -ffp-contract=off: only an explicit fma() is fused, so bits do not depend on the compiler's
choices."""


SOFTWARE_TILES = (*FLAGS, "-DSPARRING_SOFTWARE_TILES")
"""Flags of a build that emulates AMX tiles, on a processor with AVX512_BF16."""
SOFTWARE_PAIRS = (*FLAGS, "-DSPARRING_SOFTWARE_PAIRS")
"""Flags of a build that emulates products of bfloat16 pairs, on any processor."""


def build(flags: tuple[str, ...] = FLAGS) -> Path | None:
    """Return the path of the compiled library, built if it is not cached; None without a C++ compiler.

    Raises:
        RuntimeError: the compiler failed; its last lines are in the message.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.cpp"))
    version = _run([compiler, "--version"])
    parts = [version, _cpu(), *flags, *(p.name + p.read_text() for p in [*sources, *sorted(folder.glob("*.h"))])]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = cache_folder() / f"kernels-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent) as workshop:
            objects = [str(workshop / f"{source.stem}.o") for source in sources]
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                commands = [[compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
                list(pool.map(_run, commands))
            linked = str(workshop / "kernels.so")
            _run([compiler, "-shared", "-pthread", *objects, "-o", linked])
            os.replace(linked, target)
    return target


def load(path: Path) -> ctypes.CDLL:
    """Load the library at `path`. Calls through it release the GIL."""
    return ctypes.CDLL(str(path))


def cache_folder() -> Path:
    """Return the cache folder of compiled kernels."""
    return Path(os.environ.get("SPARRING_CACHE") or Path.home() / ".cache" / "sparring")


def _run(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)}: exit status {process.returncode}\n" + "\n".join(process.stderr.splitlines()[-20:])
        )
    return process.stdout


def _cpu() -> str:
    """Describe the processor as -march=native sees it, so that machines that share a cache folder use separate
    libraries."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "features", "model name", "cpu part")
    return platform.machine() + "".join(sorted({line for line in lines if line.lower().startswith(wanted)}))


if __name__ == "__main__":
    built = build()
    sys.stdout.write(f"{built or 'no g++ found: the torch path will be used'}\n")
