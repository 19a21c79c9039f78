"""Responses, written: a reply as items, whole and as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from sparring.gateway.dialect import ClientRequest, Decode
from sparring.gateway.handles import sealed
from sparring.gateway.response_tools import call_written
from sparring.reply import SampledReply


def response_of(client_request: ClientRequest, reply: SampledReply, decode: Decode) -> dict[str, Any]:
    """Return a whole response."""
    return _response(client_request, reply, output=output_of(client_request, reply, decode))


def output_of(client_request: ClientRequest, reply: SampledReply, decode: Decode) -> list[dict[str, Any]]:
    """Return the items of a reply: its thoughts, its text and its calls."""
    message, handle = reply.message, sealed(reply.id)
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thoughts = {"type": "reasoning", "id": f"rs_{handle}", "summary": []}
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({**thoughts, "content": content, "encrypted_content": _sealed(client_request, handle)})
    if message.content or not (items or message.tool_calls):
        part: dict[str, Any] = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        if client_request.logprobs:
            part["logprobs"] = _logprobs(reply, decode)
        text = {"type": "message", "id": f"msg_{handle}", "role": "assistant", "status": status}
        items.append({**text, "content": [part]})
    for number, call in enumerate(message.tool_calls):
        written = call_written(call, client_request.echo["forms"])
        prefix = "fc" if written["type"] == "function_call" else "ctc"
        items.append({**written, "id": f"{prefix}_{handle}.{number}", "status": status})
    return items


def events_of(client_request: ClientRequest, reply: SampledReply, decode: Decode) -> Iterator[bytes]:
    """Yield the events of a whole reply."""
    number = 0

    def numbered(type: str, **values: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": type, "sequence_number": number - 1, **values})

    begun = _response(client_request, reply, status="in_progress")
    yield numbered("response.created", response=begun)
    yield numbered("response.in_progress", response=begun)
    output = output_of(client_request, reply, decode)
    for index, item in enumerate(output):
        yield numbered("response.output_item.added", output_index=index, item=_empty(item))
        for type, values in _pieces(item):
            yield numbered(type, item_id=item["id"], output_index=index, **values)
        yield numbered("response.output_item.done", output_index=index, item=item)
    ended = _response(client_request, reply, output=output)
    yield numbered(f"response.{ended['status']}", response=ended)


def event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _response(
    client_request: ClientRequest, reply: SampledReply, *, status: str | None = None, output: Any = ()
) -> dict[str, Any]:
    """Return a response; `status`: of one that has not ended."""
    cut = reply.finish_reason == "length"
    return {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "instructions": None,
        "metadata": {},
        "temperature": None,
        "top_p": None,
        **client_request.echo["fields"],
        "id": f"resp_{sealed(reply.id)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status or ("incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut and status is None else None,
        "model": client_request.model,
        "output": list(output),
        "usage": None if status is not None else _usage(reply),
    }


def _usage(reply: SampledReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": len(reply.tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + len(reply.tokens),
    }


def _sealed(client_request: ClientRequest, handle: str) -> str | None:
    return handle if client_request.echo["sealed"] else None


def _logprobs(reply: SampledReply, decode: Decode) -> list[dict[str, Any]]:
    return [
        {"token": (text := decode(token)), "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=True)
    ]


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it begins in a stream."""
    if item["type"] == "reasoning":
        return {**item, "content": [], "encrypted_content": None}
    begun = {**item, "status": "in_progress"}
    if item["type"] == "message":
        return {**begun, "content": []}
    return {**begun, "arguments" if item["type"] == "function_call" else "input": ""}


def _pieces(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the types and values of the events that fill an item."""
    if item["type"] == "reasoning":
        (part,) = item["content"]
        yield from _part(part, "reasoning_text", {})
    elif item["type"] == "message":
        (part,) = item["content"]
        yield from _part(part, "output_text", {"logprobs": part["logprobs"]})
    elif item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        values = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", values
    else:
        yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
        yield "response.custom_tool_call_input.done", {"input": item["input"]}


def _part(part: Mapping[str, Any], name: str, logprobs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one part of text."""
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield "response.content_part.added", {"content_index": 0, "part": empty}
    yield f"response.{name}.delta", {"content_index": 0, "delta": part["text"], **logprobs}
    yield f"response.{name}.done", {"content_index": 0, "text": part["text"], **logprobs}
    yield "response.content_part.done", {"content_index": 0, "part": part}
