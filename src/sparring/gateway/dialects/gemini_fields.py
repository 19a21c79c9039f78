"""Fields of Google's Gemini in one spelling: its JSON takes each by the name that it has in JSON and by that of the
protocol buffers, at every depth, and a field that is null is not there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

NESTED = frozenset(
    "generateContentRequest functionDeclarations functionCall functionResponse functionCallingConfig"
    " allowedFunctionNames thoughtSignature partMetadata inlineData fileData executableCode codeExecutionResult"
    " parametersJsonSchema anyOf minItems maxItems minLength maxLength minProperties maxProperties"
    " propertyOrdering".split()
)
"""Fields of what stands in a request."""

FREE = frozenset("args response parametersJsonSchema responseJsonSchema labels default example partMetadata".split())
"""Fields whose values are data of the client's own, which stay as they are."""

_LOWER = re.compile(r"_([a-z0-9])")


def in_one_spelling(message: Any, fields: Collection[str]) -> Any:
    """Return a message with its fields as JSON spells them, without those that are null.

    Args:
        message: plain data of a request.
        fields: that are spelled; others stay as they are.
    """
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
        elif name == "properties" and isinstance(value, Mapping):  # schemas by names of the client's own
            values = {name: {own: in_one_spelling(each, fields) for own, each in value.items()}}
        else:
            values = {name: in_one_spelling(value, fields)}
        spelled |= values
    return spelled
