"""`validation.convert` accepts what `msgspec.convert` accepts, and says exactly where it does not."""

import copy
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest

from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig
from sparring.validation import InvalidValue, convert

ROOT = Path(__file__).resolve().parents[2]
WRONG: tuple[Any, ...] = (None, True, 3, 2.5, "x", [], [1], {}, {"name": "none"}, {"odd": 1})


@dataclass
class Point:
    x: int
    y: int = 0


class Place(TypedDict):
    at: Point
    note: str


class Square(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="square"):
    side: float


class Disc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="disc"):
    radius: float

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise ValueError("radius must be above 0")


class Learning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rate: float = 1.0


class Everything(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shape: Square | Disc | None = None
    place: Place | None = None
    pair: tuple[int, str] = (1, "a")
    names: frozenset[str] = frozenset()
    kinds: tuple[Literal["a", 1], ...] = ()
    by_name: dict[str, Point] = {}
    rest: Any = None
    changed: Annotated[dict[str, int | float | str], msgspec.Meta(extra={"keys_of": Learning})] = {}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"shape": None, "place": {"at": {"x": 1}, "note": "n"}, "pair": [2, "b"], "names": ["c", "c"]},
        {"shape": {"name": "square", "side": 2}, "kinds": ["a", 1], "by_name": {"k": {"x": 1, "y": 2}}, "rest": [None]},
    ],
)
def test_what_fits_becomes_what_msgspec_makes_of_it(data: dict[str, Any]) -> None:
    assert convert(data, Everything) == msgspec.convert(data, Everything, strict=True)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"shape": {"side": 2}}, 'shape.name: expected one of "square", "disc", got nothing'),
        ({"shape": {"name": "line"}}, 'shape.name: expected one of "square", "disc", got "line"'),
        ({"shape": {"name": "square"}}, "shape.side: expected a number, got nothing"),
        ({"shape": {"name": "disc", "radius": 0}}, 'shape: expected radius must be above 0, got {"name": "disc", "radius": 0}'),
        ({"place": {"at": {"x": "1"}, "note": "n"}}, 'place.at.x: expected an integer, got "1"'),
        ({"place": {"at": {"x": 1}}}, "place.note: expected a string, got nothing"),
        ({"pair": [1]}, "pair: expected a list, got [1]"),
        ({"names": ["a", 2]}, "names.1: expected a string, got 2"),
        ({"kinds": [True]}, 'kinds.0: expected one of 1, "a", got true'),
        ({"by_name": {"k": {"x": 1, "z": 2}}}, "by_name.k.z: expected one of x, y, got an unknown key"),
        ({"changed": {"rat": 1}}, "changed.rat: expected one of rate, got an unknown key"),
        ({"changed": {"rate": "x"}}, 'changed.rate: expected a number, got "x"'),
        ({"by_name": {"k": {"x": 1 << 63}}}, "by_name.k.x: expected a finite number of at most 64 bits, got 9223372036854775808"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_place(data: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValue) as wrong:
        convert(data, Everything)
    assert str(wrong.value) == said


def places(data: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each value inside of `data`."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in [(*keys, key), *places(value, (*keys, key))]]


def spoilt(data: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a copy in which one value is another, or gone."""
    copied = copy.deepcopy(data)
    *path, last = chance.choice(places(copied))
    table = copied
    for key in path:
        table = table[key]
    if isinstance(table, dict) and chance.random() < 0.2:
        del table[last]
    else:
        table[last] = copy.deepcopy(chance.choice(WRONG))
    return copied


def is_accepted(converted: Any, data: dict[str, Any]) -> bool:
    try:
        converted(data)
    except (InvalidValue, msgspec.ValidationError):
        return False
    return True


@pytest.mark.parametrize("recipe", ["quickstart", "rlhf", "duel"])
def test_a_spoilt_recipe_is_refused_exactly_where_msgspec_refuses_it(recipe: str) -> None:
    """Keys that a stage replaces in `[train]` are left out: their names are ours to check, not msgspec's."""
    whole = msgspec.to_builtins(load(ROOT / f"recipes/{recipe}.toml"))
    for section in ("sft", "preference", "reward_model", "rl", "distill"):
        whole[section].pop("train")
    (whole["rl"]["critic"] or {}).pop("train", None)
    chance, refused = random.Random(recipe), 0
    for _ in range(1500):
        data = spoilt(whole, chance)
        expected = is_accepted(lambda d: msgspec.convert(d, RunConfig, strict=True), data)
        assert is_accepted(lambda d: convert(d, RunConfig), data) is expected, data
        refused += not expected
    assert 300 < refused < 1500


def test_recipes_that_are_here_are_what_msgspec_makes_of_them() -> None:
    config = load(ROOT / "recipes/quickstart.toml")
    assert convert(msgspec.to_builtins(config), RunConfig) == config
    assert tomllib.loads((ROOT / "recipes/quickstart.toml").read_text())["run"]["name"] == config.run.name
