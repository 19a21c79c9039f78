"""Formats that a client wants the text of a reply to have, as a constraint on the reply."""

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
"""Types of formats that OpenAI's APIs have."""


def format_in(format: Any, where: str, *, kinds: Sequence[str] = KINDS, inside: str = "") -> Constraint | None:
    """Return the constraint of a format; None where the reply is free.

    Args:
        format: the field of the request; None where it is left out.
        where: the place of the field.
        kinds: its types in this API.
        inside: name of the object in the format that has the schema; empty where the format has it itself.

    Raises:
        BadInput: it is malformed, or has another type.
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
        BadInput: it is none.
    """
    return Constraint(kind="json_schema", source=json.dumps(typed(schema, where, dict, "a JSON schema")))
