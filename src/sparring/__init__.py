"""Sparring trains language-model agents with reinforcement learning.

This module has the names that a user's own file needs. Each is imported from its module when it is first used, so that
`import sparring` is fast.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    module, _, attribute = _HOMES[name].partition(":")
    globals()[name] = value = getattr(importlib.import_module(f"sparring.{module}"), attribute)
    return value


def __dir__() -> list[str]:
    """List the public names and the names that are already imported."""
    return sorted({*globals(), *__all__})
