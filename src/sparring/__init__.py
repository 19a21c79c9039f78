"""Sparring trains language-model agents with reinforcement learning.

This module has the names that a user's own file needs. Each is imported from its module when it is first used, so that
`import sparring` is fast.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparring.dashboard.show import show
    from sparring.envs.base import Env, ToolError, tool
    from sparring.envs.tools.python import PythonTool
    from sparring.launch.checkpoint_engine import CheckpointEngine as Engine
    from sparring.launch.from_python import check, evaluate, load_recipe, run
    from sparring.types import Message, Score, Task, ToolCall

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "Env",
    "Message",
    "PythonTool",
    "Score",
    "Task",
    "ToolCall",
    "ToolError",
    "check",
    "evaluate",
    "load_recipe",
    "run",
    "show",
    "tool",
]

_HOMES = {
    "Engine": "launch.checkpoint_engine:CheckpointEngine",
    "Env": "envs.base:Env",
    "Message": "types:Message",
    "PythonTool": "envs.tools.python:PythonTool",
    "Score": "types:Score",
    "Task": "types:Task",
    "ToolCall": "types:ToolCall",
    "ToolError": "envs.base:ToolError",
    "check": "launch.from_python:check",
    "evaluate": "launch.from_python:evaluate",
    "load_recipe": "launch.from_python:load_recipe",
    "run": "launch.from_python:run",
    "show": "dashboard.show:show",
    "tool": "envs.base:tool",
}
"""Definition of each public name: module below `sparring`, name in it."""


_INSTALL = "install sparring, which has the boxes"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    module, _, attribute = _HOMES[name].partition(":")
    try:
        globals()[name] = value = getattr(importlib.import_module(f"sparring.{module}"), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sparring":
            raise
        raise ImportError(f"sparring.{name}: expected Sparring, got its boxes alone; {_INSTALL}") from error
    return value


def _check_alone() -> None:
    """Refuse two distributions that own the same files: the removal of one would break the other."""
    names = (name.partition("-") for name in os.listdir(os.path.dirname(os.path.dirname(__file__))))
    found = {name for name, _, rest in names if rest.endswith(".dist-info")} & {"sparring", "sparring_boxes"}
    if len(found) > 1:
        problem = "expected one of the distributions sparring and sparring-boxes, got both, which own the same files"
        raise ImportError(f"sparring: {problem}; do: pip uninstall -y sparring sparring-boxes, then {_INSTALL}")


_check_alone()


def __dir__() -> list[str]:
    """List the public names and the names that are already imported."""
    return sorted({*globals(), *__all__})
