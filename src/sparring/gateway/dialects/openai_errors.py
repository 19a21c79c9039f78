"""Errors of OpenAI's APIs, which are the same in chat completions and in Responses."""

from __future__ import annotations

from typing import Any

from sparring.gateway.dialects.dialect import ClientError

REQUEST_ID = "x-request-id"
"""Header in which the vendor names each request."""

CODES = {(401, ""): "invalid_api_key", (404, "model"): "model_not_found"}
"""Codes of errors, by status and field."""


def error_written(error: ClientError, conversation: str, too_long: str) -> dict[str, Any]:
    """Write an error.

    Args:
        error: that the client is told of.
        conversation: the field that has the conversation.
        too_long: what is said of a prompt that is too long; empty of other errors.
    """
    code, param = CODES.get((error.status, error.field)), error.field or None
    if too_long:
        code, param = "context_length_exceeded", conversation
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": too_long or error.message, "type": kind, "param": param, "code": code}}
