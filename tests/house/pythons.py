"""Compile every file, and import what needs the standard library alone, on newer Pythons than the one of the tests.

python tests/house/pythons.py python3.12 python3.13       an interpreter that is not there is named and passed over
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIGHT = (
    "sparring.types",
    "sparring.protocols",
    "sparring.log",
    "sparring.rewards",
    "sparring.workers",
    "sparring.loop",
)
PROGRAM = """
import importlib, pathlib, sys, warnings

sys.dont_write_bytecode = True
warnings.simplefilter("error")
files = [file for folder in ("src", "tests", "benchmarks", "recipes", "docs") for file in pathlib.Path(folder).rglob("*.py")]
for file in files:
    compile(file.read_text(encoding="utf-8"), str(file), "exec")
sys.path.insert(0, "src")
for name in sys.argv[1:]:
    importlib.import_module(name)
print(f"Python {sys.version.split()[0]}: {len(files)} files compile, {len(sys.argv) - 1} modules are imported")
"""


def main(names: list[str]) -> int:
    failed = 0
    for name in names:
        path = shutil.which(name)
        if path is None:
            print(f"{name}: not there")
        else:
            failed |= subprocess.run([path, "-c", PROGRAM, *LIGHT], cwd=ROOT, check=False).returncode
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
