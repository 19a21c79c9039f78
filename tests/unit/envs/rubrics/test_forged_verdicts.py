"""Answers that try to pass their tests without being right score 0; honest programs of the same shape score 1."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparring.envs.rubrics.code import ProgramTests
from sparring.envs.rubrics.config import Code
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.types import BoxSpec, Task

BOX = BoxSpec(timeout_s=2.0, memory_bytes=128 << 20)
DOUBLE = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return 0\n"
PLAIN = ["assert double(2) == 4", "assert double(5) == 10"]
UNITTEST = [
    "import unittest\ncase = unittest.TestCase()\ncase.assertEqual(double(5), 10)\ncase.assertNotEqual(double(5), 11)"
]
WITH_BUILTINS = [
    "assert sorted([double(n) for n in range(9)]) == [2 * n for n in range(9)]",
    "assert abs(double(2) - 4) < 1e-6",
]
LOOP = ["assert all(map(lambda case: double(case[0]) == case[1], [(2, 4), (3, 6)]))"]
MEAN = ["import statistics\nassert statistics.mean([double(1), double(2)]) == 3"]
COUNTED = "import os\nnumber = len(os.listdir('/box')) + len(os.listdir('/tmp'))\nopen(f'/box/{number}', 'w').close()\n"
SAID = "os.write(1, b'passed\\n'); os.write(2, b'passed\\n')"
WALK = """
import gc, os, sys
def texts(value, depth=0):
    if isinstance(value, (str, bytes)): yield value
    elif hasattr(value, 'co_consts') and depth < 4: yield from texts(value.co_consts, depth + 1)
    elif isinstance(value, (tuple, list)) and depth < 4:
        for inner in value: yield from texts(inner, depth + 1)
    elif isinstance(value, dict) and depth < 4: yield from texts(list(value.values()), depth + 1)
def double(x):
    frame, found = sys._getframe(), [o for o in gc.get_objects() if isinstance(o, (tuple, list, dict))]
    while frame: found += [frame.f_code, frame.f_locals]; frame = frame.f_back
    for text in texts(found, 1):
        if isinstance(text, bytes) and len(text) == 32 and text.isalnum(): os.write(2, text); os._exit(0)
        if isinstance(text, str) and len(text) > 14 and text.startswith('assert double('): return 2 * x
"""
LIE = """
def lie(kind): return type('Any', (kind,), {'__eq__': lambda s, o: True, '__ne__': lambda s, o: True, '__bool__': lambda s: True,
    '__hash__': None, '__lt__': lambda s, o: True, '__sub__': lambda s, o: 0, '__abs__': lambda s: 0})()
"""
SHADOWED = """
import os, sys
for folder in ('/box', '/tmp', '/box/.local/lib/python3.%d/site-packages' % sys.version_info.minor):
    os.makedirs(folder, exist_ok=True)
    for name in ('statistics', 'json', 'sitecustomize', 'usercustomize'):
        open(f'{folder}/{name}.py', 'w').write('def mean(x): return 3')
def double(x): return 0
"""

FORGERIES = {
    "exec is replaced": (f"import builtins\nbuiltins.exec = lambda *a, **k: None\n{WRONG}", DOUBLE, PLAIN),
    "an object equals everything": (
        f"{LIE}def double(x): return lie(object)",
        "class Right:\n    def of(self, x): return 2 * x\ndef double(x): return Right().of(x)",
        PLAIN,
    ),
    "a number equals everything": (
        f"{LIE}def double(x): return lie(int)",
        f"{LIE}def double(x): return type('I', (int,), {{}})(2 * x)",
        PLAIN,
    ),
    "texts, lists and dicts equal everything": (
        f"{LIE}def double(x): return lie([str, list, dict, float, tuple, set][x % 6])",
        "import enum\nclass Of(enum.IntEnum):\n    A = 4\n    B = 10\ndef double(x): return Of(2 * x)",
        PLAIN,
    ),
    "the call ends with status 0": (
        "import sys\ndef double(x): sys.exit(0)",
        f"import sys\n{DOUBLE}if False: sys.exit(0)",
        PLAIN,
    ),
    "it brings the builtins": (
        "__builtins__ = {'abs': None}\n__name__ = 'x'\n" + WRONG,
        f"__version__ = '1'\n{DOUBLE}",
        PLAIN,
    ),
    "the process ends with status 0": (
        f"import os\ndef double(x): {SAID}; os._exit(0)",
        f"import os\n{SAID}\n{DOUBLE}",
        PLAIN,
    ),
    "it says that it passed, at the end": (
        f"import atexit, os\ndef said(): {SAID}\natexit.register(said)\nraise SystemExit(0)",
        f"import atexit\natexit.register(print, 'passed')\n{DOUBLE}",
        PLAIN,
    ),
    "unittest is patched": (
        "import unittest\nfor n in ('assertEqual', 'assertNotEqual'): setattr(unittest.TestCase, n, lambda *a: None)\n"
        + WRONG,
        f"import unittest\n{DOUBLE}",
        UNITTEST,
    ),
    "the error of assert is replaced": (
        "import builtins, sys\nclass Quiet(Exception):\n    def __init__(self, *a): sys.exit(0)\n"
        f"builtins.AssertionError = Quiet\n__debug = False\n{WRONG}",
        "def double(x):\n    assert x is not None\n    return 2 * x",
        PLAIN,
    ),
    "it looks for secret and tests in the interpreter": (
        WALK,
        "import gc, sys\ndef double(x): return 2 * x if sys._getframe() and gc.get_objects() else 0",
        PLAIN,
    ),
    "it answers before it is asked": (
        "import json, os, struct, time\ndef say(value):\n    text = json.dumps(value).encode()\n"
        "    os.write(201, struct.pack('<I', len(text)) + text)\n"
        "say([['double'], []])\nfor n in range(50): say(['', 'value', 4])\ntime.sleep(60)",
        f"def say(value): raise LookupError\n{DOUBLE}",
        PLAIN[:1],
    ),
    "it writes junk to the channel": (
        f"import os\nos.write(201, b'[1]' * 5000)\n{WRONG}",
        f"import os\nos.write(1, b'[1]')\n{DOUBLE}",
        PLAIN,
    ),
    "it brings builtins of its own": (
        "def sorted(x): return [2 * n for n in range(9)]\ndef abs(x): return 0\n" + WRONG,
        f"def len(x): return 3\n{DOUBLE}",
        WITH_BUILTINS,
    ),
    "it ends the loop of the test": (
        "def double(x): raise StopIteration",
        "def double(x): return next(iter([2 * x]))",
        LOOP,
    ),
    "its files count the tests": (
        f"{COUNTED}def double(x): return [4, 10][number]",
        f"{COUNTED}def double(x): return 2 * x if number == 0 else None",
        PLAIN,
    ),
    "it shadows the modules of the tests": (
        SHADOWED,
        "open('helper.py', 'w').write('two = 2')\nimport helper\ndef double(x): return helper.two * x",
        MEAN,
    ),
    "it kills all that it can": (
        "import os, signal\ndef double(x):\n    for pid in (os.getppid(), 1, -1, 0):\n"
        "        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass",
        f"import os\nos.kill(os.getpid(), 0)\n{DOUBLE}",
        PLAIN,
    ),
    "it forks and lets the child answer": (
        f"import os, sys\nif os.fork() == 0: os.setsid()\n{WRONG}",
        f"import os\nif os.fork() == 0: os._exit(0)\nos.wait()\n{DOUBLE}",
        PLAIN,
    ),
    "print and open are replaced": (
        "import builtins, io, sys\nbuiltins.open = builtins.print = lambda *a, **k: io.StringIO('passed')\n"
        f"sys.stdout = sys.stderr\n{WRONG}",
        f"import builtins\nbuiltins.print = lambda *a, **k: None\n{DOUBLE}",
        PLAIN,
    ),
    "the conversation is patched": (
        "import json, sys\nhere = sys.modules.get('sparring.sandbox.inner.stand_ins')\n"
        f"if here: here._write = lambda *a: {{'any': 1}}\n{WRONG}",
        f"import json\njson.dumps({{}})\n{DOUBLE}",
        PLAIN,
    ),
}


async def worth(boxes: BubblewrapBoxes, completion: str, tests: Any) -> float:
    task = Task(id="t", env="e", messages=(), data={"tests": tests}, box=BOX)
    box = await boxes.take(BOX)
    try:
        return await ProgramTests(Code()).value(completion, task, box)
    finally:
        await box.close()


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_verdict_is_worth_nothing(runner: asyncio.Runner, boxes: BubblewrapBoxes, forgery: str) -> None:
    forged, honest, tests = FORGERIES[forgery]
    assert runner.run(worth(boxes, forged, tests)) == 0
    assert runner.run(worth(boxes, honest, tests)) == 1
