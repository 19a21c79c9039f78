"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.chat_tools import read_call, tool_name, tools_in, write_call
from sparring.gateway.dialects.constraints import format_in
from sparring.gateway.dialects.dialect import (
    AnswerWriter,
    BytesOf,
    ClientCall,
    ClientError,
    ClientRequest,
    Placed,
    event,
    length_text,
    order_answers,
    thought_tokens,
)
from sparring.gateway.dialects.evidence import evidence_of
from sparring.gateway.dialects.fields import objects_in, optional, text_field, texts_in
from sparring.gateway.dialects.forms import CHAT_ROLES, ChatForm, form_in
from sparring.gateway.dialects.openai import (
    REQUEST_ID,
    UNREADABLE,
    read_choice,
    read_text,
    without_parallel,
    write_error,
    write_logprobs,
)
from sparring.reply import ReplyHead, SampledReply, calls_shown, text_shown
from sparring.types import Message, ReplyPiece

TOO_LONG = (
    "This model's maximum context length is {} tokens. However, your messages resulted in {} tokens. "
    "Please reduce the length of the messages."
)
"""Error message that makes clients compact the conversation."""


class ChatCompletions:
    """Dialect of OpenAI's chat completions. Implements `Dialect`."""

    path = "/v1/chat/completions"
    request_id = REQUEST_ID

    def read(self, call: ClientCall) -> ClientRequest:
        body = call.body
        form, noted = form_in(body, ChatForm)
        messages = list(objects_in(form.messages, "messages", "a list of messages", "a message"))
        streamed = form.stream_options
        if form.top_logprobs:
            raise refusal("top_logprobs", "0: the likeliest tokens are not sent", "more", "leave it out")
        format = format_in(form.response_format, "response_format", inside="json_schema")
        tools, freeform = tools_in(form.tools)
        forced, allowed = read_choice(body, tools, tool_name, inside="allowed_tools")
        noted = without_parallel(noted, forced or allowed)
        conversation = [Placed(where, _read_message(data, where)) for where, data in messages]
        return ClientRequest(
            messages=order_answers(conversation, "messages", replies_follow=True),
            tools=tools,
            calls=form.tool_choice != "none",
            model=form.model,
            max_tokens=form.max_tokens if form.max_completion_tokens is None else form.max_completion_tokens,
            constraint=forced or format or allowed,
            samples=form.n,
            stream=form.stream,
            logprobs=form.logprobs,
            counts=bool(optional(streamed, "include_usage", bool, "true or false", False, "stream_options.")),
            noted=noted,
            stop=texts_in([form.stop] if isinstance(form.stop, str) else form.stop, "stop"),
            evidence=evidence_of(call, noted),
            echo={"freeform": freeform},
        )

    def answer(
        self, client_request: ClientRequest, replies: Sequence[SampledReply], bytes_of: BytesOf
    ) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _write_message(reply.message, client_request.echo["freeform"]),
                "finish_reason": _reason(reply),
                "logprobs": _logprobs(reply, bytes_of) if client_request.logprobs else None,
            }
            for index, reply in enumerate(replies)
        ]
        return {**_head(client_request, replies[0].id, "chat.completion"), "choices": choices, "usage": _usage(replies)}

    def writer(self, client_request: ClientRequest, bytes_of: BytesOf) -> ChunkWriter:
        return ChunkWriter(client_request, bytes_of)

    def error(self, error: ClientError) -> dict[str, Any]:
        long = error.too_long
        too_long = "" if long is None else TOO_LONG.format(long[1], length_text(long))
        return write_error(error, "messages", too_long)


class ChunkWriter(AnswerWriter):
    """Writer of a streamed answer as chunks."""

    def __init__(self, client_request: ClientRequest, bytes_of: BytesOf) -> None:
        self._client_request = client_request
        self._bytes_of = bytes_of
        self._head: dict[str, Any] = {}
        self._num_calls: Counter[int] = Counter()
        self._shown: set[int] = set()
        self._replies: list[SampledReply] = []

    def begin(self, head: ReplyHead) -> bytes:
        self._head = _head(self._client_request, head.id, "chat.completion.chunk")
        first = {"role": "assistant", "content": None, "refusal": None}
        return b"".join(self._event(sample, first) for sample in range(self._client_request.samples))

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        self._shown.add(sample)
        if piece.call is not None:
            number = self._num_calls[sample]
            self._num_calls[sample] += 1
            call = write_call(piece.call, self._client_request.echo["freeform"])
            return self._event(sample, {"tool_calls": [{"index": number, **call}]})
        return self._event(sample, {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text})

    def end(self, sample: int, reply: SampledReply) -> bytes:
        self._replies.append(reply)
        last = self._event(sample, {}, _reason(reply))
        if sample not in self._shown:
            last = self._event(sample, {"content": ""}) + last
        if self._client_request.logprobs:
            last = self._event(sample, {}, logprobs=_logprobs(reply, self._bytes_of)) + last
        return last

    def close(self) -> bytes:
        usage = b""
        if self._client_request.counts:
            usage = event({**self._head, "choices": [], "usage": _usage(self._replies)})
        return usage + b"data: [DONE]\n\n"

    def fail(self, error: ClientError) -> bytes:
        return event(ChatCompletions().error(error))

    def _event(self, sample: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": sample, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        not_yet = {"usage": None} if self._client_request.counts else {}
        return event({**self._head, "choices": [choice], **not_yet})


def _read_message(data: Mapping[str, Any], where: str) -> Message:
    role = CHAT_ROLES.get(str(data.get("role")))
    if role is None:
        raise refusal(f"{where}.role", f"one of {', '.join(CHAT_ROLES)}", repr(data.get("role")), "correct the request")
    content = read_text(data.get("content"), f"{where}.content")
    if role == "tool":
        id = text_field(data, "tool_call_id", where, "the id of a call")
        return Message(role="tool", content=content, tool_call_id=id.removeprefix(UNREADABLE))
    if role == "assistant":
        reasoning = data.get("reasoning_content") or data.get("reasoning")
        calls = objects_in(data.get("tool_calls") or [], f"{where}.tool_calls", "a list of calls", "a call")
        return Message(
            role="assistant",
            content=content,
            reasoning=None if reasoning is None else read_text(reasoning, f"{where}.reasoning_content"),
            tool_calls=tuple(read_call(call, place) for place, call in calls),
        )
    return Message(role="user" if role == "user" else "system", content=content)


def _write_message(message: Message, freeform: Collection[str]) -> dict[str, Any]:
    calls, content = calls_shown(message), text_shown(message)
    message_sent: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    if message.reasoning:
        message_sent["reasoning_content"] = message.reasoning
    if calls:
        message_sent["tool_calls"] = [write_call(call, freeform) for call in calls]
    elif not content:
        message_sent["content"] = ""
    return message_sent


def _reason(reply: SampledReply) -> str:
    if reply.finish_reason == "length":
        return "length"
    return "tool_calls" if calls_shown(reply.message) else "stop"


def _logprobs(reply: SampledReply, bytes_of: BytesOf) -> dict[str, Any]:
    return {"content": write_logprobs(reply, bytes_of), "refusal": None}


def _head(client_request: ClientRequest, id: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{id}",
        "object": kind,
        "created": int(time.time()),
        "model": client_request.model,
    }


def _usage(replies: Sequence[SampledReply]) -> dict[str, Any]:
    thoughts = thought_tokens(replies)
    sampled, prompt = sum(len(reply.tokens) for reply in replies), replies[0].prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
        **({} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}}),
    }
