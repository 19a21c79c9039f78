"""Files of recipes/ as modules, for tests of their worlds."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from sparring.user_files.neighbours import run_file

RECIPES = Path(__file__).parents[1] / "recipes"


@functools.cache
def recipe_file(path: str) -> ModuleType:
    """Return a file below recipes/ as the module that a run makes of it, run once."""
    return run_file(RECIPES / path)
