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
from sparring.types import BoxSpec, Limits
from sparring.validation import InvalidValue, convert, dotted
from sparring.validation import read_json as read_json

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
def test_valid_data_converts_as_with_msgspec(data: dict[str, Any]) -> None:
    assert convert(data, Everything) == msgspec.convert(data, Everything, strict=True)


@pytest.mark.parametrize(
    ("data", "where", "noun"),
    [
        ({"shape": {"side": 2}}, "shape.name", 'one of "square", "disc"'),
        ({"shape": {"name": "line"}}, "shape.name", 'one of "square", "disc"'),
        ({"shape": {"name": "square"}}, "shape.side", "a number"),
        ({"shape": {"name": "disc", "radius": 0}}, "shape", "radius must be above 0"),
        ({"place": {"at": {"x": "1"}, "note": "n"}}, "place.at.x", "an integer"),
        ({"place": {"at": {"x": 1}}}, "place.note", "a string"),
        ({"pair": [1]}, "pair", "a list"),
        ({"names": ["a", 2]}, "names.1", "a string"),
        ({"kinds": [True]}, "kinds.0", 'one of 1, "a"'),
        ({"by_name": {"k": {"x": 1, "z": 2}}}, "by_name.k.z", "one of x, y"),
        ({"changed": {"rat": 1}}, "changed.rat", "one of rate"),
        ({"changed": {"rate": "x"}}, "changed.rate", "a number"),
        ({"by_name": {"k": {"x": 1 << 63}}}, "by_name.k.x", "a finite number"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_at_its_place(data: dict[str, Any], where: str, noun: str) -> None:
    with pytest.raises(InvalidValue) as refusal:
        convert(data, Everything)
    assert dotted(refusal.value.keys) == where and refusal.value.expected.startswith(noun)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"names": ["a", 2]}, "names.1: expected a string, got 2"),
        ({"kinds": [True]}, 'kinds.0: expected one of 1, "a", got true'),
        ({"shape": {"side": 2}}, 'shape.name: expected one of "square", "disc", got nothing'),
        ({"changed": {"rat": 1}}, "changed.rat: expected one of rate, got an unknown key"),
    ],
    ids=["value", "literal", "missing", "key"],
)
def test_the_text_of_a_refusal_names_place_expected_and_actual_value(data: dict[str, Any], text: str) -> None:
    """The whole sentence: users read it as it is."""
    with pytest.raises(InvalidValue) as refusal:
        convert(data, Everything)
    assert str(refusal.value) == text


def places(data: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each value inside of `data`."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in [(*keys, key), *places(value, (*keys, key))]]


def spoil(data: dict[str, Any], chance: random.Random) -> dict[str, Any]:
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


def has_odd_key(data: dict[str, Any]) -> bool:
    """Whether a table of a dataclass has a key that it does not know, which msgspec passes over."""
    env = data["env"] if isinstance(data.get("env"), dict) else {}
    tables = ((env.get(name), kind) for name, kind in (("box", BoxSpec), ("limits", Limits)))
    return any(isinstance(table, dict) and table.keys() - kind.__annotations__.keys() for table, kind in tables)


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
        data = spoil(whole, chance)
        expected = is_accepted(lambda d: msgspec.convert(d, RunConfig, strict=True), data) and not has_odd_key(data)
        assert is_accepted(lambda d: convert(d, RunConfig), data) is expected, data
        refused += not expected
    assert 300 < refused < 1500


def test_recipes_that_are_here_are_what_msgspec_makes_of_them() -> None:
    config = load(ROOT / "recipes/quickstart.toml")
    assert convert(msgspec.to_builtins(config), RunConfig) == config
    assert tomllib.loads((ROOT / "recipes/quickstart.toml").read_text())["run"]["name"] == config.run.name


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[-Infinity]",
        "1e999",
        '{"a": [-1E400]}',
        "9" * 5000,
        "9" * 400 + ".5",
        "[" * 100_000,
        '"\\ud800"',
        "{'a': 1}",
        "",
    ],
)
def test_json_is_read_by_the_letter(text: str) -> None:
    for written in (text, text.encode()):
        with pytest.raises(ValueError, match="JSON|surrogate|digits|Expecting"):
            read_json(written)


def test_what_json_may_say_is_read() -> None:
    assert read_json(b'{"a": "\\ud83d\\ude42", "b": 1e308, "c": 1e-999}') == {
        "a": "\N{SLIGHTLY SMILING FACE}",
        "b": 1e308,
        "c": 0,
    }
    assert read_json("9" * 400) == 10**400 - 1, "integers have no bound of a double"
    assert read_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="the key 'a' twice"):
        read_json('{"a": 1, "a": 2}', unique=True)
