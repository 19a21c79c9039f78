"""OpenAPI document of the gateway: its endpoints and the schemas of their requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sparring.gateway.dialects import chat_completions, gemini, messages, responses
from sparring.gateway.workers import ClaimForm
from sparring.record.leases import LeaseEnd
from sparring.record.rewards import OutsideReward

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 1}
SWITCH = {"type": "boolean"}
ITEMS = {"type": "array", "items": {"type": "object"}}
ANYTHING: dict[str, Any] = {}
FILLED = {**TEXT, "minLength": 1}


def _one_of(name: str, *values: str) -> dict[str, Any]:
    """Return the schema of an object whose field `name` has one of some values."""
    return {"type": "object", "required": [name], "properties": {name: {"enum": list(values)}}}


def _list_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a list of objects that have all these properties."""
    return {"type": "array", "items": _object(properties)}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _tool(schema: str) -> dict[str, Any]:
    """Return the schema of a tool whose parameters stand in the field `schema`."""
    return _object({"name": FILLED, schema: {"type": "object"}})


PARTS = {**_list_of({"text": TEXT}), "minItems": 1}

CALLING = _one_of("mode", "AUTO", "ANY", "VALIDATED", "NONE")
CONFIG: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(sorted(gemini.CONFIG_OBEYED | gemini.CONFIG_NOTED), ANYTHING),
    "maxOutputTokens": COUNT,
    "candidateCount": {"type": "integer", "minimum": 1, "maximum": 8},
    "stopSequences": {"type": "array", "items": FILLED},
    "responseMimeType": {"enum": ["", "text/plain", "application/json"]},
    "responseSchema": {"type": "object"},
    "responseJsonSchema": {"type": "object"},
    "responseLogprobs": SWITCH,
    "responseModalities": {"type": "array", "items": {"const": "TEXT"}, "maxItems": 1},
}
"""Schemas of the generation settings of Gemini's requests."""

TYPES: Mapping[str, Mapping[str, Any]] = {
    "model": TEXT,
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "max_output_tokens": COUNT,
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stream": SWITCH,
    "store": SWITCH,
    "generate": SWITCH,
    "logprobs": SWITCH,
    "background": {"type": "boolean", "const": False},
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "stop": {"anyOf": [FILLED, {"type": "array", "items": FILLED}]},
    "stream_options": {"type": "object"},
    "top_logprobs": {"type": "integer"},
    "response_format": _one_of("type", "text", "json_object", "json_schema"),
    "text": {"type": "object", "properties": {"format": _one_of("type", "text", "json_object", "json_schema")}},
    "input": {"anyOf": [TEXT, ITEMS]},
    "system": {"anyOf": [TEXT, ITEMS]},
    "systemInstruction": {"type": "object", "required": ["parts"], "properties": {"parts": PARTS}},
    "contents": {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {"parts": PARTS}}},
    "generationConfig": {"type": "object", "properties": CONFIG, "additionalProperties": False},
    "toolConfig": {"type": "object", "properties": {"functionCallingConfig": CALLING}},
    "output_config": {"type": "object"},
    "output_format": {"type": "object"},
    "stop_sequences": {"type": "array", "items": FILLED},
    "include": {"type": "array", "items": {"enum": sorted(responses.INCLUDED | responses.NOT_MADE)}},
}
"""Schemas of fields that are the same in every dialect. Fields without an entry accept any value here."""

CHOICE = {"anyOf": [{"enum": ["auto", "none", "required"]}, _one_of("type", "function", "custom", "allowed_tools")]}
CHAT_FUNCTION = _object({"type": {"const": "function"}, "function": _tool("parameters")})
CHAT_FREEFORM = _object({"type": {"const": "custom"}, "custom": _object({"name": FILLED})})
OWN: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "chat": {
        "tool_choice": CHOICE,
        "tools": {"type": "array", "items": {"anyOf": [CHAT_FUNCTION, CHAT_FREEFORM]}},
    },
    "responses": {"tool_choice": CHOICE, "tools": ITEMS},
    "messages": {
        "tool_choice": _one_of("type", "auto", "none", "any", "tool"),
        "tools": _list_of(_tool("input_schema")["properties"]),
    },
    "gemini": {"tools": _list_of({"functionDeclarations": _list_of({"name": FILLED})})},
}
"""Schemas of fields that differ between dialects."""


def _schema_of(form: type) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components([form])
    schema: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schemas[form.__name__]))  # a default () becomes []
    return schema


ROLES = {"chat": ["system", "developer", "user", "assistant", "tool"], "messages": ["user", "assistant", "system"]}
KEY = {"type": "apiKey", "in": "header"}


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    posts = {
        "/v1/chat/completions": _post("chat", chat_completions.OBEYED, chat_completions.NOTED, ["model", "messages"]),
        "/v1/responses": _post("responses", responses.OBEYED, responses.NOTED, ["model", "input"]),
        "/v1/messages": _post("messages", messages.OBEYED, messages.NOTED, ["model", "messages"]),
        "/v1/messages/count_tokens": _post("messages", messages.OBEYED, messages.NOTED, ["model", "messages"]),
    }
    for call in ("generateContent", "streamGenerateContent", "countTokens"):
        post = _post("gemini", gemini.OBEYED, gemini.NOTED, ["contents"])
        posts[f"/v1beta/models/{{model}}:{call}"] = {**post, "parameters": [_name("model")]}
    reward = _schema_of(OutsideReward)
    reward["properties"]["rollout"] = TEXT  # read under the run's key alone
    posts["/v1/rewards"] = {**_body_of(reward), "responses": _answers(200, 400, 401, 403, 404, 409, 410, 503)}
    posts["/v1/rollouts/claim"] = {
        **_body_of(_schema_of(ClaimForm)),
        "responses": _answers(200, 204, 400, 401, 403, 410, 503),
    }
    leased = {"parameters": [_name("id")]}
    posts["/v1/rollouts/{id}/renew"] = {**leased, "responses": _answers(200, 401, 403, 404, 410)}
    posts["/v1/rollouts/{id}/finish"] = {
        **leased,
        **_body_of(_schema_of(LeaseEnd)),
        "responses": _answers(200, 400, 401, 403, 404, 409, 410, 503),
    }
    gets: dict[str, dict[str, Any]] = {
        path: {"responses": _answers(200, 401)} for path in ("/v1/models", "/v1beta/models")
    }
    for path in ("/v1/models/{name}", "/v1beta/models/{name}"):
        gets[path] = {"responses": _answers(200, 401, 404), "parameters": [_name("name")]}
    gets["/health"] = {"responses": _answers(200), "security": []}
    paths: dict[str, dict[str, Any]] = {path: {"get": operation} for path, operation in gets.items()}
    for path, operation in posts.items():
        paths.setdefault(path, {})["post"] = operation
    paths["/v1/responses"]["get"] = {"responses": _answers(426), "security": []}
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    schemes |= {name: {**KEY, "name": name} for name in ("x-api-key", "x-goog-api-key")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sparring gateway", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": schemes},
        "security": [{name: []} for name in schemes],
    }


def _post(name: str, obeyed: Iterable[str], noted: Iterable[str], required: list[str]) -> dict[str, Any]:
    types = {**TYPES, **OWN[name]}
    fields = {field: types.get(field, ANYTHING) for field in sorted({*obeyed, *noted})}
    if name in ROLES:
        message = {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ROLES[name]}, "content": {"anyOf": [TEXT, ITEMS, {"type": "null"}]}},
        }
        fields["messages"] = {"type": "array", "items": message, "minItems": 1}
    schema = {"type": "object", "required": required, "properties": fields, "additionalProperties": False}
    return {
        **_body_of(schema),
        "responses": _answers(200, 400, 401, 404, 503),
    }


def _body_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _answers(*statuses: int) -> dict[str, Any]:
    words = {200: "The answer", 400: "A refused request", 401: "A wrong key", 404: "An unknown model, reply or lease"}
    words |= {403: "No rewards or no workers in this run", 409: "Another under the same id", 410: "Too late"}
    words |= {204: "No rollout in time"}
    words |= {426: "A WebSocket, which is refused", 503: "An engine that failed"}
    return {str(status): {"description": words[status]} for status in statuses}


def _name(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": ["policy", "other"]}}
