"""Parts that OpenAI's chat completions and Responses share: texts, choices of tools, freeform tools,
log-probabilities and errors.

The model sees a freeform tool as a function with one text argument; the client gets that text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.constraints import allowed_calls, forced_call
from sparring.gateway.dialects.dialect import BytesOf, ClientError
from sparring.gateway.dialects.fields import arguments_of, call_of, objects_in, text_field
from sparring.generation import Constraint
from sparring.reply import SampledReply
from sparring.types import ToolCall, ToolSpec

REQUEST_ID = "x-request-id"
"""Header with the vendor's request id."""

CODES = {(401, ""): "invalid_api_key", (404, "model"): "model_not_found"}
"""Codes of errors, by status and field."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text."""

PARALLEL = "parallel_tool_calls"
"""Field that allows at most one call per reply. It only has an effect on constrained calls."""

UNREADABLE = "unreadable_"
"""Prefix of the id of a freeform call whose arguments are not a single text. The input of such a call is the text that
the model wrote."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function that a request defines without a schema."""

_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def read_text(content: Any, where: str) -> str:
    """Return the text of a content, which may be a list of parts.

    Raises:
        BadInput: a part is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in objects_in(content, where, "text, or a list of parts", "a part"):
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            raise refusal(place, "a part that is text", repr(kind), "this model reads text alone")
        texts.append(text_field(part, "refusal" if kind == "refusal" else "text", place))
    return "".join(texts)


def read_choice(
    body: Mapping[str, Any],
    tools: Sequence[ToolSpec],
    name_of: Callable[[Mapping[str, Any], str], str],
    inside: str = "",
) -> tuple[Constraint | None, Constraint | None]:
    """Read the choice of tools.

    Args:
        name_of: function from a chosen tool and its place in the request to the model's name for that tool.
        inside: field of the choice that contains the allowed tools; empty if they are in the choice itself.

    Returns:
        Constraint of a reply that must call, and constraint of a reply that may only call some tools; each None if it
        does not apply.

    Raises:
        BadInput: the choice names an unknown tool, or is not supported.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None, None
    parallel = body.get(PARALLEL) is not False
    if choice == "required":
        return forced_call(tools, parallel=parallel), None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return forced_call(tools, [name_of(choice, "tool_choice")], parallel=parallel), None
    allowed = (choice.get(inside) if inside else choice) if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
        where = ".".join(filter(None, ("tool_choice", inside, "tools")))
        listed = objects_in(allowed.get("tools"), where, "a list of tools", "a tool")
        names = [name_of(tool, place) for place, tool in listed]
        if allowed["mode"] == "required":
            return forced_call(tools, names, parallel=parallel, where=where), None
        return None, allowed_calls(tools, names, parallel=parallel, where=where)
    expected = '"auto", "none", "required", a tool, or allowed_tools'
    raise refusal("tool_choice", expected, json.dumps(choice), "leave tool_choice out: the policy decides")


def without_parallel(noted: Sequence[str], constraint: Constraint | None) -> tuple[str, ...]:
    """Remove `PARALLEL` from the noted fields if there is a constraint, since constraints obey this field."""
    return tuple(name for name in noted if constraint is None or name != PARALLEL)


def write_logprobs(reply: SampledReply, bytes_of: BytesOf) -> list[dict[str, Any]]:
    """Return each id of a reply with its text, log-probability and bytes. The text of an incomplete character is
    U+FFFD; the bytes of all ids together are the bytes of the reply."""
    listed = []
    for token, logprob in zip(reply.tokens, reply.logprobs, strict=bool(reply.logprobs)):
        data = bytes_of(token)
        text = data.decode("utf-8", "replace")
        listed.append({"token": text, "logprob": logprob, "bytes": list(data), "top_logprobs": []})
    return listed


def write_error(error: ClientError, conversation: str, too_long: str) -> dict[str, Any]:
    """Write an error.

    Args:
        conversation: field of the conversation; a prompt that is too long is an error of this field.
        too_long: message for a prompt that is too long; empty for other errors.
    """
    code, param = CODES.get((error.status, error.field)), error.field or None
    if too_long:
        code, param = "context_length_exceeded", conversation
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": too_long or error.message, "type": kind, "param": param, "code": code}}


def freeform_tool(name: str, description: str, grammar: Mapping[str, Any] | None) -> ToolSpec:
    """Return a freeform tool as the model sees it.

    Args:
        grammar: `syntax` and `definition` of the input; None if any text is allowed.
    """
    if grammar is not None:
        kept = f"The input keeps to this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}"
        description = "\n\n".join(filter(None, (description, kept)))
    return ToolSpec(name=name, description=description, parameters=_PARAMETERS)


def freeform_call(id: str, name: str, input: str) -> ToolCall:
    """Return a call of a freeform tool from a conversation."""
    if id.startswith(UNREADABLE):
        return call_of(id.removeprefix(UNREADABLE), name, input)
    return ToolCall(id=id, name=name, arguments={"input": input})


def freeform_input(call: ToolCall) -> tuple[str, str]:
    """Return the id and the input text of a call, as the client gets them."""
    arguments = call.arguments
    if arguments is not None and arguments.keys() == {"input"} and isinstance(arguments["input"], str):
        return call.id, arguments["input"]
    return UNREADABLE + call.id, arguments_of(call)
