"""Responses, written: a reply as items, whole and as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sparring.gateway.dialects.dialect import EVENTS, BytesOf, ClientError, ClientRequest, encoded
from sparring.gateway.dialects.handles import EMPTY, sealed
from sparring.gateway.dialects.response_tools import call_written
from sparring.gateway.dialects.sampled_ids import logprobs_written
from sparring.reply import ReplyHead, SampledReply, pieces_of
from sparring.types import ReplyPiece

FUNCTION: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}
"""Fields that a tool has in a response, also where its request left them out."""


def response_of(client_request: ClientRequest, reply: SampledReply, bytes_of: BytesOf) -> dict[str, Any]:
    """Return a whole response: what a stream's last event has."""
    writer = ResponseWriter(client_request, bytes_of)
    writer.begin(ReplyHead(id=reply.id, prompt_tokens=reply.prompt_tokens))
    for piece in pieces_of(reply.message):
        writer.piece(0, piece)
    return writer.response(reply)


class ResponseWriter:
    """Writer of one response as events: its items one after the other. Implements `AnswerWriter`.

    Log-probabilities, of calls too, stand in the message of a reply, and are whole at its end: where a client wants
    them, calls wait for that, behind a message without text where the reply says nothing.
    """

    content_type = EVENTS

    def __init__(self, client_request: ClientRequest, bytes_of: BytesOf) -> None:
        self._client_request = client_request
        self._bytes_of = bytes_of
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item of text or thoughts that goes on
        self._texts: list[str] = []  # of it
        self._waiting: list[dict[str, Any]] = []  # calls
        self._num_shown = 0  # pieces that have an item
        self._listed = False  # whether the log-probabilities are written
        self._handle = ""
        self._id = "failed"  # until there is a reply

    def begin(self, head: ReplyHead) -> bytes:
        """Write that the response is under way."""
        self._handle, self._id = sealed(head.id), head.id
        begun = _response(self._client_request, head.id, status="in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        """Write a piece of the reply into its item."""
        if piece.call is not None:
            call = call_written(piece.call, self._client_request.echo["forms"])
            if not self._client_request.logprobs:
                return self._closed() + self._call(call)
            self._waiting.append(call)
            return self._opened("message", empty=True)
        begun = self._opened("reasoning" if piece.kind == "reasoning" else "message")
        self._texts.append(piece.text)
        return begun + self._of_part("delta", delta=piece.text)

    def end(self, sample: int, reply: SampledReply) -> bytes:
        """Write the end of the last item and the whole response."""
        events = self._ended(reply)
        response = self.response(reply)
        return events + self._event(f"response.{response['status']}", response=response)

    def close(self) -> bytes:
        """Write nothing: the end of the one reply was the end."""
        return b""

    def fail(self, error: ClientError) -> bytes:
        """Write that the response has failed."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = _response(self._client_request, self._id, status="failed")
        return self._event("response.failed", response={**failed, "error": {"code": code, "message": error.message}})

    def ping(self) -> bytes:
        """Write a comment, which clients pass over."""
        return b": ping\n\n"

    def response(self, reply: SampledReply) -> dict[str, Any]:
        """Return the whole response."""
        self._ended(reply)
        return {**_response(self._client_request, reply.id, reply=reply), "output": self._items}

    def _ended(self, reply: SampledReply) -> bytes:
        """End the last item of text or thoughts, and write the calls that wait."""
        wanted = self._client_request
        last = self._open["type"] if self._open else ""
        bare = not self._items or wanted.logprobs and last != "message" and not self._listed
        events = self._opened("message") if bare and not wanted.samples_nothing else b""
        events += self._closed(reply)
        waiting, self._waiting = self._waiting, []
        return events + b"".join(map(self._call, waiting))

    def _opened(self, kind: str, empty: bool = False) -> bytes:
        """Begin an item of text or thoughts, unless one of this kind is open. `empty`: it is no piece of the reply."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        events = self._closed()
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
        return events + self._of_item("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _closed(self, reply: SampledReply | None = None) -> bytes:
        """End the item of text or thoughts that is open. `reply`: the whole one, where this is its end."""
        if self._open is None:
            return b""
        item, text = self._open, "".join(self._texts)
        part, listed = _part(item["type"], text), {}
        if item["type"] == "message" and reply is not None and self._client_request.logprobs:
            self._listed = True
            listed = {"logprobs": logprobs_written(reply, self._bytes_of)}
        part |= listed
        events = self._of_part("done", text=text, **listed)
        events += self._of_item("response.content_part.done", content_index=0, part=part)
        cut = reply is not None and reply.finish_reason == "length"
        ended = {"status": "incomplete" if cut else "completed"} if item["type"] == "message" else {}
        if item["type"] == "reasoning" and self._client_request.echo["sealed"]:
            ended = {"encrypted_content": self._handle}
        self._items[-1] = {**item, **ended, "content": [part]}
        self._open, self._texts = None, []
        return events + self._done()

    def _call(self, item: dict[str, Any]) -> bytes:
        """Write a call: its item, what fills it, and its end."""
        function = item["type"] == "function_call"
        field = "arguments" if function else "input"
        name = "response.function_call_arguments" if function else "response.custom_tool_call_input"
        item["id"] = f"{'fc' if function else 'ctc'}_{self._handle}.{self._num_shown}"
        self._num_shown += 1
        self._items.append({**item, "status": "completed"})
        empty = {**item, field: "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        events += self._of_item(f"{name}.delta", delta=item[field])
        named = {"name": item["name"]} if function else {}
        return events + self._of_item(f"{name}.done", **named, **{field: item[field]}) + self._done()

    def _done(self) -> bytes:
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _of_part(self, name: str, **values: Any) -> bytes:
        """Write an event of the text of the open item."""
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return self._of_item(f"response.reasoning_text.{name}", content_index=0, **values)
        return self._of_item(f"response.output_text.{name}", content_index=0, **{"logprobs": [], **values})

    def _of_item(self, type: str, **values: Any) -> bytes:
        """Write an event of the last item."""
        return self._event(type, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **values)

    def _event(self, type: str, **values: Any) -> bytes:
        self._sequence_number += 1
        return event({"type": type, "sequence_number": self._sequence_number - 1, **values})


def event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encoded(data))


def _part(kind: str, text: str) -> dict[str, Any]:
    """Return the one part of an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(
    client_request: ClientRequest, id: str, *, status: str = "completed", reply: SampledReply | None = None
) -> dict[str, Any]:
    """Return a response without its items. `reply`: of one that has ended."""
    cut = reply is not None and reply.finish_reason == "length"
    now = int(time.time())
    return {
        **settings_shown(client_request.echo["fields"]),
        "id": f"resp_{sealed(id)}",
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


def settings_shown(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a response shows: what the request said, else the vendor's defaults. Those of sampling
    are the trainer's, whatever stands here.

    Source: the Open Responses specification, `ResponseResource`, in which none of them may be left out.
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
        # clients require a number: 0 where the format does not tell
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens or 0},
        "total_tokens": reply.prompt_tokens + len(reply.tokens),
    }
