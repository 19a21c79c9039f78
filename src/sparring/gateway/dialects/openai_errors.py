"""Errors of OpenAI's APIs, in the format that chat completions and Responses share."""

from __future__ import annotations

from typing import Any

from sparring.gateway.dialects.dialect import ClientError

REQUEST_ID = "x-request-id"
"""Header with the vendor's request id."""

CODES = {(401, ""): "invalid_api_key", (404, "model"): "model_not_found"}
"""Codes of errors, by status and field."""


def write_error(error: ClientError, conversation: str, too_long: str) -> dict[str, Any]:
    """Write an error.

    Args:
        error: error to write.
        conversation: field of the conversation, as the parameter of a prompt that is too long.
        too_long: message for a prompt that is too long; empty for other errors.
    """
    code, param = CODES.get((error.status, error.field)), error.field or None
    if too_long:
        code, param = "context_length_exceeded", conversation
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": too_long or error.message, "type": kind, "param": param, "code": code}}
