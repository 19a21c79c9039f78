"""Anthropic's Messages: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.constraints import forced_call, format_in
from sparring.gateway.dialects.dialect import (
    AnswerWriter,
    BytesOf,
    ClientCall,
    ClientError,
    ClientRequest,
    event,
    noted_headers,
    order_answers,
)
from sparring.gateway.dialects.evidence import evidence_of
from sparring.gateway.dialects.fields import texts_in, typed
from sparring.gateway.dialects.forms import MessagesForm, form_in
from sparring.gateway.dialects.handles import handle_of
from sparring.gateway.dialects.message_blocks import conversation_in, system_in, tools_in
from sparring.generation import Constraint
from sparring.record.identity import shown_arguments
from sparring.reply import ReplyHead, SampledReply, calls_shown, pieces_of
from sparring.types import Message, ReplyPiece, ToolSpec

NOT_CACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
"""Usage of a prompt without cached tokens."""

KINDS = {401: "authentication_error", 404: "not_found_error"}
"""Types of errors, by status."""

TOO_LONG = "prompt is too long: {} tokens > {} maximum"
"""Error message that makes clients compact the conversation, with the excess."""


class Messages:
    """Dialect of Anthropic's Messages. Implements `Dialect`."""

    path = "/v1/messages"
    request_id = "request-id"

    def read(self, call: ClientCall) -> ClientRequest:
        body = call.body
        form, noted = form_in(body, MessagesForm)
        noted += noted_headers(call.headers)
        tools, deferred = tools_in(form.tools, call.leave_out)
        system = system_in(form.system)
        heard, handle = conversation_in(form.messages, deferred)
        forced = _forced_constraint(form.tool_choice, tools, deferred)
        return ClientRequest(
            messages=order_answers(heard, "messages", system),
            tools=tools,
            calls=forced is not None or _may_call(form.tool_choice),
            model=form.model,
            max_tokens=form.max_tokens,
            constraint=forced or _constraint(form),
            stream=form.stream,
            noted=noted,
            stop=texts_in(form.stop_sequences, "stop_sequences"),
            evidence=evidence_of(call, noted, handle),
        )

    def answer(
        self, client_request: ClientRequest, replies: Sequence[SampledReply], bytes_of: BytesOf
    ) -> dict[str, Any]:
        (reply,) = replies
        return {
            **_head(client_request, reply.id),
            "content": _blocks(reply.message, handle_of(reply.id)),
            "stop_reason": _reason(reply),
            "stop_sequence": reply.stop,
            "usage": _usage(reply),
        }

    def writer(self, client_request: ClientRequest, bytes_of: BytesOf) -> EventWriter:
        return EventWriter(client_request)

    def error(self, error: ClientError) -> dict[str, Any]:
        text = error.message if error.too_long is None else TOO_LONG.format(*error.too_long)
        other = "api_error" if error.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": KINDS.get(error.status, other), "message": text}}


class EventWriter(AnswerWriter):
    """Writer of a streamed answer as events, block by block."""

    def __init__(self, client_request: ClientRequest) -> None:
        self._client_request = client_request
        self._num_blocks = 0
        self._open = ""  # kind of the open block
        self._handle = ""

    def begin(self, head: ReplyHead) -> bytes:
        self._handle = handle_of(head.id)
        usage = {"input_tokens": head.prompt_tokens, "output_tokens": 1}  # the cached ones are known at the end
        head_sent = {**_head(self._client_request, head.id), "content": [], "stop_reason": None}
        return _event("message_start", {"message": {**head_sent, "usage": {**NOT_CACHED, **usage}}})

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        if piece.call is not None:
            call = piece.call
            empty = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            written = json.dumps(dict(shown_arguments(call)), ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": written}
            return self._open_block("tool_use", empty) + self._delta(delta) + self._close_block()
        if piece.kind == "reasoning":
            begun = self._open_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta({"type": "thinking_delta", "thinking": piece.text})
        begun = self._open_block("text", {"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": piece.text})

    def end(self, sample: int, reply: SampledReply) -> bytes:
        empty = b"" if self._num_blocks else self._open_block("text", {"type": "text", "text": ""})
        ended = {"stop_reason": _reason(reply), "stop_sequence": reply.stop}
        last = _event("message_delta", {"delta": ended, "usage": _usage(reply)})
        return empty + self._close_block() + last + _event("message_stop", {})

    def fail(self, error: ClientError) -> bytes:
        return event(Messages().error(error))

    def ping(self) -> bytes:
        return _event("ping", {})

    def _open_block(self, kind: str, empty: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed, self._open = self._close_block(), kind
        self._num_blocks += 1
        return closed + _event("content_block_start", {"index": self._num_blocks - 1, "content_block": empty})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _close_block(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signature = self._delta({"type": "signature_delta", "signature": self._handle}) if kind == "thinking" else b""
        return signature + _event("content_block_stop", {"index": self._num_blocks - 1})


def _forced_constraint(choice: Any, tools: Sequence[ToolSpec], deferred: Mapping[str, ToolSpec]) -> Constraint | None:
    """Return the constraint of a reply that must call, or None if the reply may be text."""
    kind = typed({"type": "auto"} if choice is None else choice, "tool_choice", dict, "a choice").get("type")
    if kind not in ("any", "tool"):
        return None
    several = not choice.get("disable_parallel_tool_use")
    if kind == "any":
        return forced_call(tools, parallel=several)
    name = typed(choice.get("name"), "tool_choice.name", str, "the name of a tool")
    return forced_call([*tools, *deferred.values()], [name], parallel=several, where="tool_choice.name")


def _may_call(choice: Any) -> bool:
    """Return whether tools may be called.

    Raises:
        BadInput: the choice is unknown.
    """
    kind = ({"type": "auto"} if choice is None else choice).get("type")
    if kind not in ("auto", "none"):
        raise refusal("tool_choice", "auto, none, any or tool", repr(kind), "leave it out: the policy decides")
    return bool(kind == "auto")


def _constraint(form: MessagesForm) -> Constraint | None:
    if form.output_config.get("format") is not None:
        return format_in(form.output_config["format"], "output_config.format", kinds=("json_schema",))
    return format_in(form.output_format, "output_format", kinds=("json_schema",))


def _blocks(message: Message, handle: str) -> list[dict[str, Any]]:
    """Return the blocks of a reply, with its handle as the signature of its thoughts. A malformed call has the sampled
    text as its only argument."""
    blocks: list[dict[str, Any]] = []
    for piece in pieces_of(message):
        if piece.call is not None:
            call, arguments = piece.call, dict(shown_arguments(piece.call))
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        elif piece.kind == "reasoning":
            blocks.append({"type": "thinking", "thinking": piece.text, "signature": handle})
        elif blocks and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += piece.text
        else:
            blocks.append({"type": "text", "text": piece.text})
    return blocks or [{"type": "text", "text": ""}]


def _reason(reply: SampledReply) -> str:
    if reply.finish_reason == "length":
        return "max_tokens"
    if reply.stop is not None:
        return "stop_sequence"
    return "tool_use" if calls_shown(reply.message) else "end_turn"


def _head(client_request: ClientRequest, id: str) -> dict[str, Any]:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": client_request.model,
        "stop_sequence": None,
    }


def _usage(reply: SampledReply) -> dict[str, Any]:
    thoughts = reply.reasoning_tokens
    return {
        **NOT_CACHED,
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": len(reply.tokens),
        **({} if thoughts is None else {"output_tokens_details": {"thinking_tokens": thoughts}}),
    }


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return event({"type": name, **data})
