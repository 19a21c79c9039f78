"""Recipes: TOML files and dictionaries into a `RunConfig`, with overrides, and refusals that name the key."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.config import OWN, named
from sparring.algo.user_rules import recall
from sparring.errors import BadInput, refusal
from sparring.recipe.run_config import RunConfig
from sparring.recipe.sections.preference import NAMED
from sparring.recipe.url_secrets import found, masked, refused
from sparring.validation import InvalidValue, Key, convert, dotted


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, a TOML file, and apply overrides to it.

    Args:
        overrides: `a.b=value` each, applied in order. The value is TOML (`3`, `true`, `[1, 2]`); what is not TOML is
            taken as a string. A number in the path picks from a list: `env.datasets.0.weight=2`.

    Raises:
        BadInput: the file cannot be read, is not TOML, or has an unknown key or an invalid value.
    """
    return from_data(_read(path), str(path), overrides)


def load_recorded(path: str | Path, *, runs_rules: bool = False) -> RunConfig:
    """Read the recipe that a run has written into its folder, with the user's own rules as recorded. With `runs_rules`,
    the rules' files in the run's folder are executed, so that the rules can compute."""
    data = _read(path)
    recall(Path(path).parent, data.get("algo"), OWN, runs=runs_rules)
    return _built([(str(path), data)])


def _read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # a byte-order mark is no statement
    except OSError as error:
        raise refusal(str(path), "a recipe file", error.strerror or str(error), "check the path") from error
    except ValueError as error:
        raise refusal(str(path), "TOML", str(error), "correct the file there") from error


def from_data(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of a recipe that is already parsed, with overrides as in `load`. `where` names its source in
    errors.

    Raises:
        BadInput: `data` has an unknown key or an invalid value.
    """
    states = [(where, data)]
    for override in overrides:
        states.append((f"--set {masked(override)}", _overridden(states[-1][1], override)))
    for keys, url in found(states[-1][1]):
        source = next(source for source, state in states if (keys, url) in found(state))
        raise refused(f"{source}: {dotted(keys)}", next(key for key in reversed(keys) if isinstance(key, str)))
    return _built(states)


def _built(states: Sequence[tuple[str, dict[str, Any]]]) -> RunConfig:
    """Return the config of the last state of a recipe. `states`: pairs of a source (the file, then each override) and
    the data after it; a refusal names the source that brought in the invalid value."""
    try:
        return _converted(states[-1][1])
    except InvalidValue as wrong:
        source = next(source for source, data in states if _is_wrong_alike(data, wrong))
        raise _refused(wrong, source) from wrong


def _is_wrong_alike(data: dict[str, Any], wrong: InvalidValue) -> bool:
    try:
        _converted(data)
    except InvalidValue as error:
        return (error.keys, error.text) == (wrong.keys, wrong.text)
    return False


def _converted(data: dict[str, Any]) -> RunConfig:
    """Build the config. Where a table has a `name`, a string in its place stands for the table of this name with its
    defaults."""
    complete = {**data, "algo": named(data["algo"])} if "algo" in data else dict(data)
    for (section, key), name in NAMED.items():
        value = complete[section].get(key) if isinstance(complete.get(section), dict) else None
        if isinstance(value, (str, dict)):
            table = {"name": value} if isinstance(value, str) else {"name": name, **value}
            complete[section] = {**complete[section], key: table}
    config: RunConfig = convert(complete, RunConfig)
    return config


def _refused(wrong: InvalidValue, source: str) -> BadInput:
    where = f"{source}: {dotted(wrong.keys)}" if wrong.keys else source
    value = f", got {wrong.got}" if wrong.got else ""
    advice = _advice(wrong) if wrong.unknown else wrong.do or "correct it there or with --set"
    return BadInput(f"{where}: expected {wrong.expected}{value}; {advice}", where)


def _advice(wrong: InvalidValue) -> str:
    """Name the key that was probably meant: a close name in the same section, the same name in the nearest table, or a
    similar name in the same table."""
    name, above = wrong.unknown, [str(key) for key in wrong.keys[:-1]]
    known = [(key, f"{table}.{key}") for table, keys in _section_keys().items() for key in keys]
    known.sort(key=lambda pair: -_num_shared(pair[1].split("."), above))
    section = {key: path for key, path in reversed(known) if path.split(".")[:1] == above[:1]}
    section |= {key: dotted((*above, key)) for key in wrong.allowed}
    same = [path for key, path in known if key == name]
    for keys, cutoff in ((section, 0.85 if same else 0.8), (wrong.allowed, 0.6)):
        if close := difflib.get_close_matches(name, keys, n=1, cutoff=cutoff):
            return f"do you mean {section[close[0]]}?"
        if same:
            return f"do you mean {same[0]}?"
    return wrong.do


def _num_shared(path: Sequence[str], other: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False)))


def _section_keys(kind: type[msgspec.Struct] = RunConfig, path: str = "") -> dict[str, set[str]]:
    """Return the keys of every section and of the tables in it, by dotted path."""
    found: dict[str, set[str]] = {}
    for field in msgspec.structs.fields(kind):
        inside = f"{path}{field.name}"
        if dataclasses.is_dataclass(field.type):
            found[inside] = {inner.name for inner in dataclasses.fields(field.type)}
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found[inside] = {inner.encode_name for inner in msgspec.structs.fields(field.type)}
            found |= _section_keys(field.type, f"{inside}.")
    return found


def _overridden(data: dict[str, Any], override: str) -> dict[str, Any]:
    """Return a copy of `data` with one `a.b=c` applied."""
    where = f"--set {masked(override)}"
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise refusal(where, "section.key=value", repr(masked(override)), "write it like rl.steps=10")
    keys = path.split(".")
    result = copy.deepcopy(data)
    at: Any = result
    for depth, key in enumerate(keys):
        here = ".".join(keys[:depth]) or "the recipe"
        if isinstance(at, list):
            if not key.isdigit() or int(key) >= len(at):
                raise refusal(where, f"an index below {len(at)} into the list {here}", key, "count from 0")
            index: Key = int(key)
        elif isinstance(at, dict):
            index = key
        else:
            raise refusal(where, f"a table at {here}", json.dumps(at, default=str), "set that key itself")
        if depth == len(keys) - 1:
            at[index] = _toml_value(text)
        else:
            at = at.setdefault(index, {}) if isinstance(at, dict) else at[index]
    return result


def _toml_value(text: str) -> Any:
    """Parse `text` as a TOML value; return it unchanged if it is not TOML, so that `--set run.name=first` needs no
    quotes."""
    try:
        parsed = tomllib.loads(f"value = {text.strip()}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
