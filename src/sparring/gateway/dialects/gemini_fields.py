"""Field names of Google's Gemini. Google's JSON allows each name in camelCase and in snake_case at every depth, and
null for a missing field."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

NESTED = frozenset(
    "generateContentRequest functionDeclarations functionCall functionResponse functionCallingConfig"
    " allowedFunctionNames thoughtSignature partMetadata inlineData fileData executableCode codeExecutionResult"
    " parametersJsonSchema anyOf additionalProperties prefixItems minItems maxItems minLength maxLength minProperties"
    " maxProperties propertyOrdering".split()
)
"""Fields inside the fields of a request."""

FREE = frozenset("args response parametersJsonSchema responseJsonSchema labels default example partMetadata".split())
"""Fields whose values are the client's own data and stay unchanged."""

_LOWER = re.compile(r"_([a-z0-9])")


def in_one_spelling(message: Any, fields: Collection[str]) -> Any:
    """Convert the field names of a message to camelCase, and remove fields that are null."""
    if isinstance(message, list):
        return [in_one_spelling(each, fields) for each in message]
    if not isinstance(message, Mapping):
        return message
    spelled: dict[str, Any] = {}
    for name, value in message.items():
        other = _LOWER.sub(lambda match: match[1].upper(), name)
        name = other if other in fields else name
        if name in FREE or value is None:
            values = {} if value is None else {name: value}
        elif name == "properties" and isinstance(value, Mapping):  # schemas by the client's own names
            values = {name: {own: in_one_spelling(each, fields) for own, each in value.items()}}
        else:
            values = {name: in_one_spelling(value, fields)}
        spelled |= values
    return spelled
