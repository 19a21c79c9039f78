"""Python programs in boxes of an image, which run on the image's own interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.protocols import Sandbox

STAND_INS = "sparring.sandbox.inner.stand_ins"
"""Module that programs may import, as in boxes of the other images."""
# As `python3 -c CODE` says it, except that CODE comes by standard input: an argument has at most 128 KiB.
BOOT = """
import sys
_searched = sys.path[:]
sys.path[:] = filter(None, _searched)  # not the folder of the box, until the modules of ours are there
import types
def _run(code, name, text):
    if name.encode() in code:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.argv[1:] = []
    def hook(kind, error, trace):
        trace = trace and trace.tb_next and trace.tb_next.tb_next  # without the two frames of ours
        sys.__excepthook__(kind, error.with_traceback(trace), trace)
    sys.excepthook = hook
    sys.path[:] = _searched
    exec(compile(code.decode("utf-8", "surrogatepass"), "<string>", "exec"), main.__dict__)
_run(sys.stdin.buffer.read(), *sys.argv[1:])
"""


@cache
def python_line() -> tuple[str, ...]:
    """Return the command that runs the Python program on its standard input."""
    file = Path(__file__).parent / "inner/stand_ins.py"
    return ("python3", "-s", "-c", BOOT, STAND_INS, file.read_text(encoding="utf-8"))


def python_request(in_image: bool, bounds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a Python program, which the box gets as standard input."""
    return {"op": "exec", "argv": list(python_line()), **bounds} if in_image else {"op": "python", **bounds}


async def check_has_python(box: Sandbox, image: str) -> None:
    """Refuse an image on which no Python program can run, and close the box.

    Args:
        box: unused box of the image, in which nothing of the policy's has run.

    Raises:
        BadInput: the image has no `python3`, or its `python3` does not start.
    """
    try:
        result = await box.exec(["python3", "-c", ""])
    finally:
        await box.close()
    if result.exit_code:
        said = result.stderr.strip()[-400:] or f"its python3 ended with status {result.exit_code}"
        remedy = "do: install Python 3.9 or newer in it, or judge in a box of the image 'python' (`beside`)"
        raise refusal("converse", "a box whose image has a Python", f"{image!r}: {said}", remedy)
