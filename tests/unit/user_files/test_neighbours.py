"""Files that import the files beside them."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from sparring.errors import BadInput
from sparring.user_files.named import named
from sparring.user_files.neighbours import with_neighbours

WORLD = """
from dataclasses import dataclass
import helpers
import pack.deep as deep
from pack import sibling
from helpers import NUMBER as number

@dataclass
class Held:
    of: "helpers.Kind"

def told():
    import later
    return (helpers.NUMBER, number, deep.VALUE, sibling.VALUE, later.VALUE)
"""


def folder(place: Path, number: int) -> Path:
    files = {
        "world.py": WORLD,
        "helpers.py": f"import json, other\nNUMBER = {number}\nclass Kind: pass\n",
        "other.py": "import helpers\n",
        "later.py": "VALUE = 'later'\n",
        "json.py": "raise ImportError('not this one')\n",
        "pack/__init__.py": "",
        "pack/deep.py": "from .sibling import VALUE\nfrom . import sibling\nVALUE += 1\n",
        "pack/sibling.py": "import helpers\nVALUE = helpers.NUMBER * 10\n",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place / "world.py"


def test_two_worlds_have_helpers_of_their_own(tmp_path: Path) -> None:
    before, path = set(sys.modules), list(sys.path)
    first, second = folder(tmp_path / "a_b", 1), folder(tmp_path / "a" / "b", 2)
    told = [named(f"{file}:told", "env.name") for file in (first, second)]
    assert [each() for each in told] == [(1, 1, 11, 10, "later"), (2, 2, 21, 20, "later")]
    assert "helpers" not in sys.modules and sys.path == path
    assert all(name.startswith("sparring_user_") for name in set(sys.modules) - before)
    held = named(f"{first}:Held", "env.name")
    assert pickle.loads(pickle.dumps(held(of=3))) == held(of=3)


def test_a_changed_neighbour_is_run_again(tmp_path: Path) -> None:
    world = folder(tmp_path, 1)
    helpers = named(f"{world}:helpers", "env.name")
    assert named(f"{world}:helpers", "env.name") is helpers, "what did not change is shared"
    (tmp_path / "helpers.py").write_text("NUMBER = 300\n")
    os.utime(tmp_path / "helpers.py", ns=(1, 1))
    assert named(f"{world}:told", "env.name")()[:4] == (300, 300, 3001, 3000)
    names = ["helpers.py", "later.py", "other.py", "pack/__init__.py", "pack/deep.py", "pack/sibling.py", "world.py"]
    (tmp_path / "helpers.py").write_text("import other\n")
    assert with_neighbours(world) == [tmp_path / name for name in names]


@pytest.mark.parametrize(
    ("code", "said"),
    [("import sys\nsys.exit(0)", "what ends the process belongs under"), ("exit('no')", "got SystemExit: no"),
     ("import missing_thing", "ModuleNotFoundError"), ("x = (", "SyntaxError"),
     ("import broken", "got ZeroDivisionError"), ("from . import helpers", "ImportError")],
)  # fmt: skip
def test_a_file_that_does_not_run_is_refused(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "world.py").write_text(code)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(BadInput, match="env.name: expected a Python file .*world.py that runs") as refused:
        named(f"{tmp_path}/world.py:World", "env.name")
    assert said in str(refused.value)
