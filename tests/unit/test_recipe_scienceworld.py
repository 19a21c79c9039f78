"""What recipes/scienceworld adds to the game, without the game: fewer words, and refusals. The game itself is played in
tests/real/test_scienceworld.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparring.errors import BadInput
from sparring.types import Task
from sparring.user_files.named import named

WORLD = Path(__file__).parents[2] / "recipes/scienceworld/world.py"
HALLWAY = """This room is called the hallway. In it, you see:
\tthe agent
\ta chair. On the chair is: nothing.
\ta box (containing nothing)
\ta substance called air
\ta substance called soap
\ta bed. On the bed is: a mattress. On the mattress is: a pillow..
\ta fridge. The fridge door is closed.
You also see:
\tA door to the outside (that is open)
\tA door to the kitchen (that is closed)
"""


def of_world(name: str) -> Any:
    return named(f"{WORLD}:{name}", "env.name")


def test_a_look_is_one_line_without_what_is_idle_in_an_order_of_its_own() -> None:
    brief = of_world("brief")
    told = (
        "This room is called the hallway. In it, you see: a bed. On the bed is: a mattress. On the mattress is: a pillow; "
        "a box; a chair; a fridge. The fridge door is closed; soap. "
        "You also see: A door to the kitchen (that is closed); A door to the outside."
    )
    lines = HALLWAY.splitlines()
    assert brief(HALLWAY) == brief("\n".join([lines[0], *reversed(lines[1:8]), *lines[8:]])) == told
    assert brief("You move to the kitchen.") == "You move to the kitchen."
    assert brief("Ambiguous request: enter a number\n0:\tpick up cup\n1:\tpick up cup (red)") == (
        "Ambiguous request: enter a number 0:\tpick up cup 1:\tpick up cup (red)"
    )


def test_without_the_package_or_java_the_world_is_refused_by_name() -> None:
    for missing, told in ((("not_there", "sh"), "pip install scienceworld"), (("json", "not-there"), "Java runtime")):
        with pytest.raises(BadInput, match=told) as refused:
            of_world("check_installed")(*missing)
        assert refused.value.where == "recipes/scienceworld"


def test_a_row_of_another_file_is_refused() -> None:
    world = of_world("ScienceWorld")
    task = Task(id="a", env="ScienceWorld", messages=(), data={"prompt": "2 + 2?", "variation": 1})
    with pytest.raises(BadInput, match=r"family, simplifications.*tasks\.py") as refused:
        world.check(object.__new__(world), task)
    assert refused.value.where == "task a"
