"""`[env]` -> an `EnvFactory`: a built-in name, `package.module:Name`, `path/to/file.py:Name`, or a reward function."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.factory import ReadRows, WorldFactory
from sparring.envs.reward_function import RewardFunction, RewardFunctionWithPython
from sparring.envs.schema import env_args
from sparring.errors import BadInput, boundary, refusal
from sparring.protocols import EnvFactory

BUILT_IN = {"reasoning_gym": "sparring.envs.reasoning_gym:ReasoningGym"}


def load_env(config: EnvConfig, read_rows: ReadRows | None = None) -> EnvFactory:
    """Find the world and check its settings.

    Args:
        config: `[env]`.
        read_rows: reads data files; `sparring.tasks.files.read_rows`, handed in because sibling packages never import
            each other. Only a world with `data` needs it.

    Raises:
        BadInput: no such world, settings that it does not have, or tasks that cannot be made.
    """
    if config.reward:
        function = _named(config.reward, "env.reward")
        if not callable(function) or isinstance(function, type):
            raise refusal("env.reward", "a function", repr(function), "name a function of the file")
        kind = RewardFunctionWithPython if "python" in config.tools else RewardFunction
        return WorldFactory(function.__name__, functools.partial(kind, function), config, read_rows)
    if config.name not in BUILT_IN and ":" not in config.name:
        known = ", ".join(sorted(BUILT_IN))
        raise refusal(
            "env.name", f"one of {known}, or package.module:Name, or path/to/file.py:Name", repr(config.name), "correct it"
        )
    world = _named(BUILT_IN.get(config.name, config.name), "env.name")
    if isinstance(world, type) and issubclass(world, Env):
        args = env_args(config.args, world.Args)
        return WorldFactory(world.__name__, functools.partial(world, args), config, read_rows)
    if callable(world):
        return world(config)
    raise refusal("env.name", "a subclass of Env, or a factory called with the EnvConfig", repr(world), "name one")


def _named(name: str, where: str) -> Any:
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise refusal(where, "path/to/file.py:name or package.module:name", repr(name), "add the part after the colon")
    module = _from_file(Path(source), where) if source.endswith(".py") else _from_package(source, where)
    if not hasattr(module, attribute):
        there = [n for n, v in vars(module).items() if isinstance(v, Callable) and v.__module__ == module.__name__]
        raise refusal(where, f"a name defined in {source}", repr(attribute), f"use one of: {', '.join(there) or 'none'}")
    return getattr(module, attribute)


def _from_package(source: str, where: str) -> Any:
    with boundary(BadInput, where, f"an installed module {source}", "install it, or name a file.py"):
        return importlib.import_module(source)


def _from_file(path: Path, where: str) -> Any:
    if not path.is_file():
        raise refusal(where, f"a Python file {path}", "no such file", "check the path; it is relative to where you stand")
    name = f"sparring_user_{path.resolve().as_posix().strip('/').removesuffix('.py').replace('/', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Type hints of the file's dataclasses are looked up in sys.modules.
    sys.modules[name] = module
    with boundary(BadInput, where, f"a Python file {path} that runs", "correct it"):
        spec.loader.exec_module(module)
    return module
