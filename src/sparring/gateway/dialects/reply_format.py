"""Response formats that a client asks for, as a constraint on the reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import typed
from sparring.generation import Constraint

JSON_OBJECT = Constraint(kind="json_schema", source='{"type":"object"}')
"""Constraint of a reply that is any JSON object."""

KINDS = ("text", "json_object", "json_schema")
"""Types of response formats in OpenAI's APIs."""


def format_in(format: Any, where: str, *, kinds: Sequence[str] = KINDS, inside: str = "") -> Constraint | None:
    """Return the constraint of a response format, or None if the reply is free text.

    Args:
        format: field of the request; None if the request has no such field.
        where: place of the field.
        kinds: types that this API has.
        inside: field of the format that contains the schema; empty if the format itself has the schema.

    Raises:
        BadInput: the format is malformed or has another type.
    """
    if format is None:
        return None
    kind = typed(format, where, dict, "a format").get("type")
    if kind not in kinds:
        raise refusal(f"{where}.type", " or ".join(kinds), repr(kind), "correct the request")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if inside:
        where = f"{where}.{inside}"
        format = typed(format.get(inside), where, dict, "a schema with a name")
        if format.get("schema") is None:
            return JSON_OBJECT
    return schema_in(format.get("schema"), f"{where}.schema")


def schema_in(schema: Any, where: str) -> Constraint:
    """Return the constraint of a JSON schema.

    Raises:
        BadInput: it is not an object.
    """
    return Constraint(kind="json_schema", source=json.dumps(typed(schema, where, dict, "a JSON schema")))
