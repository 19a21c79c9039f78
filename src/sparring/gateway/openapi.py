"""OpenAPI document of the gateway: its endpoints and the schemas of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.gateway.dialects.forms import (
    ChatForm,
    GeminiForm,
    MessagesForm,
    RequestForm,
    ResponsesForm,
    schema_of,
)
from sparring.gateway.workers import ClaimForm
from sparring.record.leases import LeaseEnd
from sparring.record.rewards import OutsideReward

KEY = {"type": "apiKey", "in": "header"}


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    posts = {
        "/v1/chat/completions": _post(ChatForm),
        "/v1/responses": _post(ResponsesForm),
        "/v1/messages": _post(MessagesForm),
        "/v1/messages/count_tokens": _post(MessagesForm),
    }
    for call in ("generateContent", "streamGenerateContent", "countTokens"):
        posts[f"/v1beta/models/{{model}}:{call}"] = {**_post(GeminiForm), "parameters": [_name("model")]}
    reward = schema_of(OutsideReward)
    reward["properties"]["rollout"] = {"type": "string"}  # read under the run's key alone
    posts["/v1/rewards"] = {**_body_of(reward), "responses": _answers(200, 400, 401, 403, 404, 409, 410, 503)}
    posts["/v1/rollouts/claim"] = {
        **_body_of(schema_of(ClaimForm)),
        "responses": _answers(200, 204, 400, 401, 403, 410, 503),
    }
    leased = {"parameters": [_name("id")]}
    posts["/v1/rollouts/{id}/renew"] = {**leased, "responses": _answers(200, 401, 403, 404, 410)}
    posts["/v1/rollouts/{id}/finish"] = {
        **leased,
        **_body_of(schema_of(LeaseEnd)),
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


def _post(form: type[RequestForm]) -> dict[str, Any]:
    return {**_body_of(schema_of(form)), "responses": _answers(200, 400, 401, 404, 503)}


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
