"""Rules of `[algo]` in files of the user's own, `algo.credit = "median.py:Median"`: how they load, how a run records
them, and how they reach other processes.

A rule's class gets an additional field `digest`, of its file and of the files of that folder that it imports. So a
recorded recipe identifies the code that ran.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import xxhash
from msgspec.structs import asdict

from sparring.algo.base import name_of
from sparring.errors import BadInput, boundary, refusal
from sparring.observe.atomic_write import write_whole
from sparring.scratch import scratch
from sparring.user_files.named import named
from sparring.user_files.neighbours import with_neighbours
from sparring.validation import InvalidValue, Key, dotted

FOLDER = "rules"
"""Subfolder of a run for the files of its own rules, with a folder for each digest."""

_CLASSES: dict[tuple[str, str], type[Any]] = {}
"""Classes by name and digest. Equal files give one class, so that rules of two loads are equal."""
_TEXTS: dict[type[Any], tuple[str, Mapping[str, bytes]]] = {}
"""Digest and files (by name) of each class; a class without files cannot compute."""
SCRATCH = ExitStack()
"""Folders for the files of unpickled rules, kept until this process ends, because a rule may import a file late."""
atexit.register(SCRATCH.close)


def is_own(name: object) -> TypeGuard[str]:
    """Return whether a rule's name is `path/to/file.py:Class`."""
    return isinstance(name, str) and ".py:" in name


def is_from_file(rule: object) -> bool:
    """Return whether a rule is from a file of the user's."""
    return type(rule) in _TEXTS


def own_rules(algo: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Yield the rules of `[algo]` that are from files of the user's, each with its key."""
    for part, value in asdict(algo).items():
        rules = value if isinstance(value, tuple) else (value,)
        yield from ((part, rule) for rule in rules if is_from_file(rule))


def naming(rule: msgspec.Struct) -> AbstractContextManager[None]:
    """Return a context in which an error of a rule from a file of the user's names the rule (`BadInput`)."""
    if not is_from_file(rule):
        return nullcontext()
    return boundary(BadInput, "[algo]", f"{name_of(rule)} to compute an update", "correct it, and begin a new run")


def class_of(base: type[Any]) -> Callable[[Mapping[str, Any], tuple[Key, ...]], type[Any] | None]:
    """Return a function for `validation.convert` that returns the class of a table: the class in the file that the
    table's `name` gives, or None if `name` has no file.

    Raises:
        InvalidValue: the class is no subclass of `base`, or the recipe names a digest that the file does not have.
        BadInput: the file or the class does not exist, or the file fails to run.
    """

    def of_table(table: Mapping[str, Any], keys: tuple[Key, ...]) -> type[Any] | None:
        name, digest = table.get("name"), table.get("digest")
        if not isinstance(name, str) or not is_own(name):
            return None
        rule = _CLASSES.get((name, str(digest))) or _load(name, _path(name), dotted(keys))
        if not issubclass(rule, base):
            raise InvalidValue(keys, f"a subclass of {base.__module__}.{base.__name__}", name)
        if digest not in (None, _TEXTS[rule][0]):
            fix = "restore the file, or leave `digest` out to take it as it is"
            raise InvalidValue((*keys, "digest"), f"the digest of {name}, {_TEXTS[rule][0]}", repr(digest), fix)
        return rule

    return of_table


def record(folder: Path, algo: msgspec.Struct) -> None:
    """Write the files of a recipe's own rules into a run's folder."""
    for _, rule in own_rules(algo):
        _write(folder / FOLDER / rule.digest, _TEXTS[type(rule)][1])


def recall(folder: Path, algo: object, bases: Mapping[str, type[Any]], *, runs: bool) -> None:
    """Register the classes of a recorded recipe's own rules: with `runs`, from the files in the run's folder; otherwise
    no code runs, and the classes only have the recipe's settings as fields.

    Args:
        algo: the recipe's table `[algo]` as plain data.
        bases: base class of the rules of each part.
    """
    values = algo.items() if isinstance(algo, Mapping) else ()
    tables = ((part, table) for part, value in values for table in (value if isinstance(value, list) else [value]))
    for part, table in tables:
        name, digest = (table.get("name"), table.get("digest")) if isinstance(table, Mapping) else (None, None)
        if not is_own(name) or not isinstance(digest, str):
            continue
        if runs:
            _load(name, folder / FOLDER / digest / _path(name).name, f"{folder}: algo.{part}")
        elif (name, digest) not in _CLASSES:
            fields = [(key, Any) for key in table if key not in ("name", "digest", *bases[part].__struct_fields__)]
            rule = msgspec.defstruct(name.rpartition(":")[2], fields, bases=(bases[part],), frozen=True, kw_only=True)
            _CLASSES[name, digest] = _with_digest(rule, name, digest, {})


def _path(name: str) -> Path:
    return Path(name.rpartition(":")[0])


def _load(name: str, path: Path, where: str) -> type[Any]:
    files = {str(file.relative_to(path.resolve().parent)): file.read_bytes() for file in with_neighbours(path)}
    if path.is_file():  # a link keeps its own name, by which the recipe names it
        files[path.name] = files.pop(path.resolve().name)
    digest = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(sorted(files.items())))
    if (name, digest) not in _CLASSES or not _TEXTS[_CLASSES[name, digest]][1]:
        rule = named(f"{path}:{name.rpartition(':')[2]}", where)
        if not isinstance(rule, type) or not issubclass(rule, msgspec.Struct):
            raise refusal(where, "a class of a rule", repr(name), "see docs/extend/credit-rule.md")
        if "digest" in rule.__struct_fields__:
            raise refusal(where, f"{name} without a field `digest`, which the record adds", "one", "rename it")
        _CLASSES[name, digest] = _with_digest(rule, name, digest, files)
    return _CLASSES[name, digest]


def _with_digest(rule: type[msgspec.Struct], name: str, digest: str, files: Mapping[str, bytes]) -> type[Any]:
    """Return a subclass whose tag is the rule's name in a recipe, with the field `digest`; pickled with its files."""

    inside = {"__doc__": rule.__doc__, "__reduce__": lambda self: (_restored, (name, digest, files, asdict(self)))}
    options: Any = {"tag": name, "tag_field": "name", "frozen": True, "kw_only": True, "forbid_unknown_fields": True}
    made = msgspec.defstruct(
        rule.__name__, [("digest", str, digest)], bases=(rule,), module=rule.__module__, namespace=inside, **options
    )
    _TEXTS[made] = (digest, files)
    return made


def _restored(name: str, digest: str, files: Mapping[str, bytes], values: Mapping[str, Any]) -> Any:
    if (name, digest) not in _CLASSES:
        folder = SCRATCH.enter_context(scratch())
        _write(folder, files)
        _load(name, folder / _path(name).name, name)
    return _CLASSES[name, digest](**values)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, data)
