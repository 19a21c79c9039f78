"""What a task looks like to the model, and what a right reply to it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from package import Row

from sparring.envs.splits import derived_seed
from sparring.types import Message, ToolCall, ToolSpec

JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""BFCL's own types by JSON schema's, as its handlers replace them (`GORILLA_TO_OPENAPI`); others have one name in
both."""

REFUSALS = (
    "None of these functions can do that.",
    "I have no function for this.",
    "That is beyond the functions I have.",
    "No function here fits your question.",
)
"""What the expert says where no function fits."""


def tools(functions: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Return BFCL's functions as tools."""
    return tuple(
        ToolSpec(name=f["name"], description=f["description"], parameters=schema(f["parameters"])) for f in functions
    )


def schema(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema of what BFCL says of a value."""
    out = dict(described)
    if isinstance(out.get("type"), str):
        out["type"] = JSON_TYPES.get(out["type"], out["type"])
    if isinstance(out.get("properties"), Mapping):
        out["properties"] = {name: schema(each) for name, each in out["properties"].items()}
    if isinstance(out.get("items"), Mapping):
        out["items"] = schema(out["items"])
    return out


def reply(row: Row) -> Message:
    """Return a right reply: each call with the first value that is right for each of its arguments, and a sentence
    where no function fits. What may be left out is left out."""
    if not row.answer:
        return Message(role="assistant", content=REFUSALS[derived_seed("refusal", row.id) % len(REFUSALS)])
    needed = {function["name"]: function["parameters"].get("required", ()) for function in row.functions}
    calls = [
        ToolCall(id=f"call_{n}", name=name, arguments=_chosen(given, needed.get(name, ())))
        for n, call in enumerate(row.answer)
        for name, given in call.items()
    ]
    return Message(role="assistant", tool_calls=tuple(calls))


def _chosen(given: Mapping[str, Sequence[Any]], needed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the first right value of each key; "" among them says that the key may be left out."""
    return {
        key: _value(next(v for v in right if v != "" or len(right) == 1))
        for key, right in given.items()
        if key in needed or "" not in right
    }


def _value(value: Any) -> Any:
    """Return a value in which an object has right values for each key, with the first of them."""
    if isinstance(value, Mapping):
        return _chosen(value)
    if isinstance(value, list):
        return [_value(each) for each in value]
    return value
