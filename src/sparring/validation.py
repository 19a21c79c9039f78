"""Conversion of plain data (TOML, JSON) to msgspec structs, with exact place and declared type of a value that does not
fit, and of numbers of any library to Python's.

`msgspec.convert` names a place in an English sentence, and leaves out which entry of a table it means. This module
walks the declared types itself, so that a refusal can name the key that the user wrote and the keys that exist.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from typing import Any

from msgspec import inspect as declared

from sparring.errors import BadInput

Key = str | int


_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of half of a surrogate pair, with or without the other half."""


def read_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Read JSON strictly by RFC 8259; Python's own reader accepts more.

    Args:
        unique: whether an object that repeats a key is refused; otherwise the last value counts.

    Raises:
        ValueError: the text is not JSON, is nested too deep, or has NaN, an infinity, a number beyond a double, an
            integer of thousands of digits, or half of a surrogate pair.
    """
    pairs = unique_keys if unique else None
    try:
        text = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=not_json, parse_float=_finite)
        if _ESCAPED_HALF.search(text) is not None:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair: {error.object[error.start]!r}") from None
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error
    return value


class InvalidValue(ValueError):
    """A value that does not fit the type that is declared for its place.

    Attributes:
        keys: path to the value from the outermost table.
        expected: values that are accepted, as in `errors.refusal`.
        got: the value; empty if `expected` already names it.
        do: advice; empty if the only advice is to write another value.
        unknown: the name of a key that its table does not have, else empty.
        allowed: the names that the table of an unknown key has.
    """

    def __init__(
        self,
        keys: Iterable[Key],
        expected: str,
        got: str = "",
        do: str = "",
        *,
        unknown: str = "",
        allowed: Iterable[str] = (),
    ) -> None:
        self.keys, self.expected, self.got, self.do = tuple(keys), expected, got, do
        self.unknown, self.allowed = unknown, frozenset(allowed)
        super().__init__(self.text)

    @property
    def text(self) -> str:
        """Place, expected value and actual value in one line: `code: expected a string, got 3`."""
        place = f"{dotted(self.keys)}: " if self.keys else ""
        return f"{place}expected {self.expected}{f', got {self.got}' if self.got else ''}"


def dotted(keys: Iterable[Key]) -> str:
    """Join keys as a user writes them: `env.datasets.0.weight`."""
    return ".".join(map(str, keys))


def convert(data: Any, kind: Any) -> Any:
    """Build a value of the type `kind` from plain data. No value is coerced, except an integer where a float is
    declared.

    Args:
        data: tables, lists, strings, numbers, booleans and None.
        kind: any type that `msgspec.inspect.type_info` understands. A dictionary that is declared as
            `Annotated[dict[...], msgspec.Meta(extra={"keys_of": SomeStruct})]` must have keys and values of that
            struct. For a table at a place declared as `Annotated[T, msgspec.Meta(extra={"class_of": function})]`, the
            function gets the table and its keys, and returns the struct's class; None stands for T.

    Raises:
        InvalidValue: something does not fit; the first in the order of the data.
    """
    return _value(_declared(kind), data, ())


def number(what: str, value: object) -> float:
    """Convert a real number to a Python float: an int, a bool, a float, a Fraction, a Decimal, or a scalar of an array
    library (`numpy.float32`, an array or tensor of shape ()). It may be NaN or infinite. Raises ValueError if the value
    is anything else, or too large; the message names it by `what`."""
    if type(value) is float:
        return value
    plain = plain_scalar(value)
    if isinstance(plain, (numbers.Real, Decimal)):
        with suppress(OverflowError, ValueError):  # an int of 400 digits, a signalling NaN
            return float(plain)
    raise ValueError(f"expected a number as {what}, got {value!r:.80}")


def plain_scalar(value: object) -> object:
    """Convert a scalar of an array library to Python's type; return anything else unchanged."""
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return item()
    return value


def in_words(kind: declared.Type) -> str:
    """Describe a declared type for a user: `an integer or a string`, `one of "a", "b"`."""
    kind = _plain(kind)
    if isinstance(kind, declared.UnionType):
        words = (in_words(option) for option in kind.types if not isinstance(option, declared.NoneType))
        return " or ".join(dict.fromkeys(words))
    if isinstance(kind, declared.LiteralType):
        return "one of " + ", ".join(json.dumps(value) for value in kind.values)
    if isinstance(kind, declared.CollectionType):
        return f"a list of: {in_words(kind.item_type)}"
    return _WORDS.get(type(kind), "another value")


_WORDS = {
    declared.IntType: "an integer",
    declared.FloatType: "a number",
    declared.StrType: "a string",
    declared.BoolType: "true or false",
    declared.TupleType: "a list",
    declared.DictType: "a table",
    declared.StructType: "a table",
    declared.DataclassType: "a table",
    declared.TypedDictType: "a table",
}


_of_class = lru_cache(maxsize=None)(declared.type_info)
"""Return the cached description of a class; describing a whole recipe takes tens of milliseconds."""


def _declared(kind: Any) -> declared.Type:
    return _of_class(kind) if isinstance(kind, type) else declared.type_info(kind)


def _plain(kind: declared.Type) -> declared.Type:
    return kind.type if isinstance(kind, declared.Metadata) else kind


def _value(kind: declared.Type, data: Any, keys: tuple[Key, ...]) -> Any:
    if isinstance(kind, declared.Metadata):
        if (table := (kind.extra or {}).get("keys_of")) is not None and isinstance(data, Mapping):
            _value(_declared(table), data, keys)
        class_of = (kind.extra or {}).get("class_of") if isinstance(data, Mapping) else None
        if class_of is not None and (chosen := class_of(data, keys)) is not None:
            return _inner(_declared(chosen), data, keys)
        kind = kind.type
    options = kind.types if isinstance(kind, declared.UnionType) else (kind,)
    fitting = [option for option in map(_plain, options) if _has_shape(option, data)]
    tagged = [option for option in fitting if isinstance(option, declared.StructType) and option.tag is not None]
    if len(tagged) > 1:
        return _struct(_chosen(tagged, data, keys), data, keys)
    if not fitting:
        raise InvalidValue(keys, in_words(kind), _shown(data), "write a value of that kind")
    return _inner(fitting[0], data, keys)


def _has_shape(kind: declared.Type, data: Any) -> bool:
    """Return True if the outermost layer of `data` is of the declared kind."""
    match kind:
        case declared.AnyType():
            return True
        case declared.NoneType():
            return data is None
        case declared.BoolType():
            return isinstance(data, bool)
        case declared.IntType():
            return isinstance(data, int) and not isinstance(data, bool)
        case declared.FloatType():
            return isinstance(data, (int, float)) and not isinstance(data, bool)
        case declared.StrType():
            return isinstance(data, str)
        case declared.LiteralType():
            return any(type(value) is type(data) and value == data for value in kind.values)
        case declared.StructType() | declared.DictType() | declared.DataclassType() | declared.TypedDictType():
            return isinstance(data, Mapping)
        case declared.TupleType():
            return isinstance(data, (list, tuple)) and len(data) == len(kind.item_types)
        case declared.CollectionType():
            return isinstance(data, (list, tuple))
    return False


def _inner(kind: declared.Type, data: Any, keys: tuple[Key, ...]) -> Any:
    match kind:
        case declared.IntType() | declared.FloatType():
            return _number(kind, data, keys)
        case declared.StructType():
            return _struct(kind, data, keys)
        case declared.DataclassType() | declared.TypedDictType():
            return _record(kind, data, keys)
        case declared.DictType():
            return {key: _value(kind.value_type, value, (*keys, key)) for key, value in data.items()}
        case declared.TupleType():
            return tuple(
                _value(item, value, (*keys, n))
                for n, (item, value) in enumerate(zip(kind.item_types, data, strict=True))
            )
        case declared.CollectionType():
            items = [_value(kind.item_type, value, (*keys, n)) for n, value in enumerate(data)]
            return _COLLECTIONS.get(type(kind), list)(items)
    return data


_COLLECTIONS = {declared.VarTupleType: tuple, declared.SetType: set, declared.FrozenSetType: frozenset}


def _number(kind: declared.IntType | declared.FloatType, data: int | float, keys: tuple[Key, ...]) -> int | float:
    wide = isinstance(data, int) and not -(1 << 63) <= data < 1 << 63
    if wide or not math.isfinite(data):
        raise InvalidValue(keys, "a finite number of at most 64 bits", str(data), "write one")
    least, most = kind.ge, kind.le
    if (least is not None and data < least) or (most is not None and data > most):
        most_words = f"at most {most}" if least is None else f"from {least} to {most}"
        raise InvalidValue(keys, f"at least {least}" if most is None else most_words, str(data), "write such a number")
    return float(data) if isinstance(kind, declared.FloatType) else data


def _struct(kind: declared.StructType, data: Mapping[str, Any], keys: tuple[Key, ...]) -> Any:
    values = _fields(kind, {str(kind.tag_field)} if kind.tag is not None else set(), data, keys)
    if kind.tag is not None and kind.tag_field in data:
        _chosen([kind], data, keys)
    return _made(kind.cls, values, data, keys)


def _made(kind: type, values: dict[str, Any], data: Mapping[str, Any], keys: tuple[Key, ...]) -> Any:
    """Build an object. If its class refuses the values, raise an `InvalidValue` with their place instead."""
    try:
        return kind(**values)
    except InvalidValue:
        raise
    except BadInput as error:
        expected, _, do = str(error).removeprefix(f"{error.where}: expected ").rpartition("; ")
        raise InvalidValue((*keys, error.where.rpartition(".")[2]), expected, do=do) from error
    except ValueError as error:
        problem = str(error)
        raise InvalidValue(keys, problem, "" if ", got" in problem else _shown(data, 200)) from error


def _record(kind: Any, data: Mapping[str, Any], keys: tuple[Key, ...]) -> Any:
    """Build a dataclass or a TypedDict."""
    values = _fields(kind, set(), data, keys)
    return values if isinstance(kind, declared.TypedDictType) else _made(kind.cls, values, data, keys)


def _fields(kind: Any, beside: set[str], data: Mapping[str, Any], keys: tuple[Key, ...]) -> dict[str, Any]:
    """Build the values of a table's fields; `beside` has the names of further keys that the table may have."""
    fields, values = {field.encode_name: field for field in kind.fields}, {}
    for key, value in data.items():
        if key in fields:
            values[fields[key].name] = _value(fields[key].type, value, (*keys, key))
        elif key not in beside:
            allowed = fields.keys() | beside
            names = ", ".join(sorted(allowed)) or "no key at all"
            raise InvalidValue(
                (*keys, key), f"one of {names}", "an unknown key", "remove it", unknown=str(key), allowed=allowed
            )
    for name, field in fields.items():
        if field.required and name not in data:
            table = f"[{dotted(keys)}]" if keys else "the recipe"
            raise InvalidValue((*keys, name), in_words(field.type), "nothing", f"add {name} to {table}")
    return values


def _chosen(
    options: Sequence[declared.StructType], data: Mapping[str, Any], keys: tuple[Key, ...]
) -> declared.StructType:
    field = str(options[0].tag_field)
    tags = declared.LiteralType(tuple(option.tag for option in options))
    if field not in data:
        raise InvalidValue((*keys, field), in_words(tags), "nothing", f"add {field} to [{dotted(keys)}]")
    for option in options:
        if option.tag == data[field]:
            return option
    raise InvalidValue((*keys, field), in_words(tags), _shown(data[field]), "write a value of that kind")


def _shown(data: Any, length: int = 80) -> str:
    return json.dumps(data, default=str)[:length]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; raise ValueError if it repeats a key."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!a} twice")
    return value


def not_json(name: str) -> Any:
    """Raise ValueError for NaN or an infinity."""
    raise ValueError(f"{name}, which is not JSON: write a number, or null")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else not_json(number[:40])
