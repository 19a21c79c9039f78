"""Registry: `[env]` -> an `EnvFactory` for a built-in name, `package.module:Name`, `path/to/file.py:Name`, a reward
function, or a rubric."""

from __future__ import annotations

from functools import partial

import msgspec

from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.factory import ReadRows, WorldFactory
from sparring.envs.guests.openenv import OpenEnvServer
from sparring.envs.guests.pool import GuestConfig, Guests
from sparring.envs.guests.world import GuestWorld
from sparring.envs.reward_calls import ByName, name_of
from sparring.envs.reward_function import OUTSIDE, RewardFunction, RewardFunctionWithPython, outside
from sparring.envs.rubrics.judges import Judges
from sparring.envs.rubrics.proof_cache import of_user
from sparring.envs.rubrics.rubric import Rubric
from sparring.envs.rubrics.world import RubricWorld, RubricWorldWithPython
from sparring.envs.schema import env_args
from sparring.errors import BadInput, boundary, refusal
from sparring.protocols import EnvFactory
from sparring.user_files.named import named

BUILT_IN = {"reasoning_gym": "sparring.envs.reasoning_gym:ReasoningGym"}


def load_env(config: EnvConfig, read_rows: ReadRows | None = None, judges: Judges | None = None) -> EnvFactory:
    """Return the factory of a world, with its settings checked.

    Args:
        read_rows: reader of data files, `sparring.tasks.files.read_rows`; a parameter because packages of one layer
            never import each other. Only a world with `data` needs it.

    Raises:
        BadInput: the world does not exist, does not have these settings, or its tasks cannot be made.
    """
    if config.reward:
        function = outside if config.reward == OUTSIDE else named(config.reward, "env.reward")
        if not callable(function) or isinstance(function, type):
            raise refusal("env.reward", "a function", repr(function), "name a function of the file")
        kind = RewardFunctionWithPython if "python" in config.tools else RewardFunction
        called = ByName(function, "env.reward", config.reward)
        return WorldFactory(name_of(function), partial(kind, called), config, read_rows)
    if config.rubric:
        rubric = Rubric(config.rubric, judges=judges, proven=of_user())
        world = RubricWorldWithPython if "python" in config.tools else RubricWorld
        return WorldFactory("rubric", partial(world, rubric), config, read_rows)
    if config.guest is not None:
        return _guest_factory(config, config.guest)
    if config.name not in BUILT_IN and ":" not in config.name:
        names = ", ".join((*sorted(BUILT_IN), "package.module:Name"))
        raise refusal("env.name", f"one of {names}, or path/to/file.py:Name", repr(config.name), "correct it")
    world = named(BUILT_IN.get(config.name, config.name), "env.name")
    if isinstance(world, type) and issubclass(world, Env):
        args = env_args(config.args, world.Args)
        return WorldFactory(world.__name__, partial(world, args), config, read_rows)
    expected, remedy = "a subclass of sparring.Env, or a factory called with the EnvConfig", "derive it from Env"
    if not callable(world):
        raise refusal("env.name", expected, repr(world)[:80], "name one")
    with boundary(BadInput, "env.name", expected, remedy):
        factory: EnvFactory = world(config)
    if not all(callable(getattr(factory, method, None)) for method in ("make", "tasks", "expert", "prove")):
        raise refusal("env.name", expected, f"{config.name}, which gave {factory!r:.80}", remedy)
    return factory


def _guest_factory(config: EnvConfig, guest: GuestConfig) -> EnvFactory:
    """Return the factory of a world in a guest. Its tasks are those that the adapter lists, or seeds."""
    guests = OpenEnvServer(guest.url) if guest.url else Guests(guest)
    name, make = guests.name.replace(" ", "-"), partial(GuestWorld, guests, guests.roles_with(config.args), config.args)
    if "tasks" not in guests.functions:
        return WorldFactory(name, make, config, None)
    rows = guests.ask("tasks", config.args)
    config = msgspec.structs.replace(config, data=f"tasks of {guests.name}")
    return WorldFactory(name, make, config, lambda path, columns: rows)
