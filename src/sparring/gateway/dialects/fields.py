"""Readers for the fields of requests. A field of the wrong type is refused with its place in the request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sparring.errors import refusal
from sparring.types import ToolCall
from sparring.validation import read_json

PlacedObjects = Iterable[tuple[str, Mapping[str, Any]]]

COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""Content codings by their first bytes, for the refusal of compressed bodies."""


def to_json(data: Any) -> bytes:
    """Encode plain data as JSON in UTF-8; integers may have any size."""
    try:
        return msgspec.json.encode(data)
    except OverflowError:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def body_of(data: bytes) -> dict[str, Any]:
    """Read the body of a request.

    Raises:
        BadInput: the body is not a JSON object in UTF-8; see `validation.read_json`.
    """
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        body = _decode_slowly(data)
    if not isinstance(body, dict):
        raise refusal("body", "a JSON object", type(body).__name__, "correct the request")
    return body


def _decode_slowly(data: bytes) -> Any:
    """Read a body that the fast decoder refused, because an integer exceeds 64 bits or because the body is invalid."""
    try:
        return read_json(data.decode("utf-8"))
    except ValueError as error:
        coding = next((name for begun, name in COMPRESSED.items() if data.startswith(begun)), "")
        if coding:
            do = "send the body as it is"
            raise refusal("content-encoding", "a body that is not compressed", coding, do) from None
        raise refusal("body", "a JSON object in UTF-8", str(error), "correct the request") from None


def typed(data: Any, where: str, kind: type | tuple[type, ...], expected: str) -> Any:
    """Return a value of a request; raise BadInput if the value is not of type `kind`."""
    if not isinstance(data, kind) or isinstance(data, bool) and kind is int:
        got = "nothing" if data is None else type(data).__name__
        raise refusal(where, expected, got, "correct the request")
    return data


def objects_in(values: Any, where: str, expected: str, one: str) -> PlacedObjects:
    """Yield the objects of a list, each with its place. `one` describes an object, for the refusal."""
    for at, value in enumerate(typed(values, where, list, expected)):
        place = f"{where}[{at}]"
        yield place, typed(value, place, dict, one)


def optional(values: Mapping[str, Any], name: str, kind: type, expected: str, default: Any, before: str = "") -> Any:
    """Return an optional value of a request, or the default.

    Args:
        before: place of `values` in the request, with a dot at the end.
    """
    value = values.get(name)
    return default if value is None else typed(value, f"{before}{name}", kind, expected)


def texts_in(texts: Any, where: str) -> tuple[str, ...]:
    """Return an optional list of texts of a request; raise BadInput if a text is empty."""
    for text in typed([] if texts is None else texts, where, list, "a list of texts"):
        if not typed(text, where, str, "a list of texts"):
            raise refusal(where, "texts that are not empty", '""', "leave it out")
    return tuple(texts or ())


def text_field(values: Mapping[str, Any], name: str, where: str, expected: str = "text") -> str:
    """Return a required text of an object at the place `where`."""
    return str(typed(values.get(name), f"{where}.{name}", str, expected))


def name_in(value: Any, where: str) -> str:
    """Return the name of a tool; raise BadInput if the name is empty."""
    if not typed(value, where, str, "a name"):
        raise refusal(where, "a name", '""', "name it")
    return str(value)


def call_of(id: str, name: str, arguments: str) -> ToolCall:
    """Return a call with arguments as JSON text. Arguments that do not parse make a malformed call. Empty text means no
    arguments, as in servers of this API."""
    if not arguments.strip():
        return ToolCall(id=id, name=name, arguments={})
    try:
        parsed = read_json(arguments)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return ToolCall(id=id, name=name, arguments=None, raw=arguments)
    return ToolCall(id=id, name=name, arguments=parsed)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as JSON; for a malformed call, the sampled text."""
    return call.raw if call.arguments is None else json.dumps(dict(call.arguments), ensure_ascii=False)
