"""Writer of OpenAI's Responses: a reply as items, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sparring.gateway.dialects.dialect import AnswerWriter, BytesOf, ClientError, ClientRequest, event
from sparring.gateway.dialects.handles import EMPTY, handle_of
from sparring.gateway.dialects.openai import write_logprobs
from sparring.gateway.dialects.response_tools import write_call
from sparring.reply import ReplyHead, SampledReply, pieces_of
from sparring.types import ReplyPiece

FUNCTION: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}
"""Fields that a response shows for a function tool even if its request omits them."""


def response_of(client_request: ClientRequest, reply: SampledReply, bytes_of: BytesOf) -> dict[str, Any]:
    """Return a complete response, equal to the response in a stream's last event."""
    writer = ResponseWriter(client_request, bytes_of)
    writer.begin(ReplyHead(id=reply.id, prompt_tokens=reply.prompt_tokens))
    for piece in pieces_of(reply.message):
        writer.piece(0, piece)
    return writer.response(reply)


class ResponseWriter(AnswerWriter):
    """Writer of a streamed response, item by item.

    Log-probabilities of all tokens, calls included, belong to the message item and are complete at the end of the
    reply. For a client that wants log-probabilities, calls are therefore written at the end, after the message item,
    which is empty if the reply has no text.
    """

    def __init__(self, client_request: ClientRequest, bytes_of: BytesOf) -> None:
        self._client_request = client_request
        self._bytes_of = bytes_of
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # open item of text or thoughts
        self._texts: list[str] = []  # texts of the open item
        self._waiting: list[dict[str, Any]] = []  # calls that wait for the end
        self._num_shown = 0  # number of pieces that have an item
        self._listed = False  # whether the log-probabilities were written
        self._handle = ""
        self._id = "failed"  # until the reply begins

    def begin(self, head: ReplyHead) -> bytes:
        self._handle, self._id = handle_of(head.id), head.id
        begun = _response(self._client_request, head.id, status="in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        if piece.call is not None:
            call = write_call(piece.call, self._client_request.echo["forms"])
            if not self._client_request.logprobs:
                return self._close_item() + self._call(call)
            self._waiting.append(call)
            return self._open_item("message", empty=True)
        begun = self._open_item("reasoning" if piece.kind == "reasoning" else "message")
        self._texts.append(piece.text)
        return begun + self._part_event("delta", delta=piece.text)

    def end(self, sample: int, reply: SampledReply) -> bytes:
        events = self._end_items(reply)
        response = self.response(reply)
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ClientError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = _response(self._client_request, self._id, status="failed")
        return self._event("response.failed", response={**failed, "error": {"code": code, "message": error.message}})

    def response(self, reply: SampledReply) -> dict[str, Any]:
        """Return the complete response."""
        self._end_items(reply)
        return {**_response(self._client_request, reply.id, reply=reply), "output": self._items}

    def _end_items(self, reply: SampledReply) -> bytes:
        """End the last item of text or thoughts, and write the waiting calls."""
        wanted = self._client_request
        last = self._open["type"] if self._open else ""
        bare = not self._items or wanted.logprobs and last != "message" and not self._listed
        events = self._open_item("message") if bare and not wanted.samples_nothing else b""
        events += self._close_item(reply)
        waiting, self._waiting = self._waiting, []
        return events + b"".join(map(self._call, waiting))

    def _open_item(self, kind: str, empty: bool = False) -> bytes:
        """Begin an item of text or thoughts, unless an item of this kind is open. `empty`: whether the item has no
        piece of the reply."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        events = self._close_item()
        item: dict[str, Any]
        if kind == "reasoning":
            item = {"type": kind, "id": f"rs_{self._handle}", "summary": [], "content": [], "encrypted_content": None}
        else:
            number = EMPTY if empty else self._num_shown
            item = {"type": kind, "id": f"msg_{self._handle}.{number}", "role": "assistant", "content": []}
            item["status"] = "in_progress"
        self._num_shown += not empty
        self._open = item
        self._items.append(item)
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        return events + self._item_event("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _close_item(self, reply: SampledReply | None = None) -> bytes:
        """End the open item of text or thoughts. `reply`: complete reply, if the reply has ended."""
        if self._open is None:
            return b""
        item, text = self._open, "".join(self._texts)
        part, listed = _part(item["type"], text), {}
        if item["type"] == "message" and reply is not None and self._client_request.logprobs:
            self._listed = True
            listed = {"logprobs": write_logprobs(reply, self._bytes_of)}
        part |= listed
        events = self._part_event("done", text=text, **listed)
        events += self._item_event("response.content_part.done", content_index=0, part=part)
        cut = reply is not None and reply.finish_reason == "length"
        ended = {"status": "incomplete" if cut else "completed"} if item["type"] == "message" else {}
        if item["type"] == "reasoning" and self._client_request.echo["sealed"]:
            ended = {"encrypted_content": self._handle}
        self._items[-1] = {**item, **ended, "content": [part]}
        self._open, self._texts = None, []
        return events + self._item_done()

    def _call(self, item: dict[str, Any]) -> bytes:
        """Write a call: its item, its arguments or input, and its end."""
        function = item["type"] == "function_call"
        field = "arguments" if function else "input"
        name = "response.function_call_arguments" if function else "response.custom_tool_call_input"
        item["id"] = f"{'fc' if function else 'ctc'}_{self._handle}.{self._num_shown}"
        self._num_shown += 1
        self._items.append({**item, "status": "completed"})
        empty = {**item, field: "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        events += self._item_event(f"{name}.delta", delta=item[field])
        named = {"name": item["name"]} if function else {}
        return events + self._item_event(f"{name}.done", **named, **{field: item[field]}) + self._item_done()

    def _item_done(self) -> bytes:
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _part_event(self, name: str, **values: Any) -> bytes:
        """Write an event about the text of the open item."""
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return self._item_event(f"response.reasoning_text.{name}", content_index=0, **values)
        return self._item_event(f"response.output_text.{name}", content_index=0, **{"logprobs": [], **values})

    def _item_event(self, type: str, **values: Any) -> bytes:
        return self._event(type, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **values)

    def _event(self, type: str, **values: Any) -> bytes:
        self._sequence_number += 1
        return event({"type": type, "sequence_number": self._sequence_number - 1, **values})


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(
    client_request: ClientRequest, id: str, *, status: str = "completed", reply: SampledReply | None = None
) -> dict[str, Any]:
    """Return a response without its items. `reply`: reply of a completed response."""
    cut = reply is not None and reply.finish_reason == "length"
    now = int(time.time())
    return {
        **response_settings(client_request.echo["fields"]),
        "id": f"resp_{handle_of(id)}",
        "object": "response",
        "created_at": now,
        "completed_at": None if reply is None or cut else now,
        "status": "incomplete" if cut else status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": client_request.model,
        "output": [],
        "usage": None if reply is None else _usage(reply),
    }


def response_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a response shows: the request's settings, or the vendor's defaults. Sampling settings
    are shown but do not apply, because the run decides about sampling.

    Source: the Open Responses specification, `ResponseResource`, which requires all fields.
    """
    tools = [FUNCTION | tool if tool.get("type") == "function" else tool for tool in fields.get("tools", ())]
    reasoning = fields.get("reasoning")
    return {
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "instructions": None,
        "metadata": {},
        "previous_response_id": None,
        "truncation": "disabled",
        "temperature": 1.0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_logprobs": 0,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "store": True,
        "background": False,
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": None,
        **fields,
        "tools": tools,
        "text": {"format": {"type": "text"}, **fields.get("text", {})},
        "reasoning": None if reasoning is None else {"effort": None, "summary": None, **reasoning},
    }


def _usage(reply: SampledReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": len(reply.tokens),
        # clients require a number: 0 if the format does not mark thoughts
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens or 0},
        "total_tokens": reply.prompt_tokens + len(reply.tokens),
    }
