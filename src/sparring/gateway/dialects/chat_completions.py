"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.chat_tools import choice_in, read_call, tools_in, write_call
from sparring.gateway.dialects.dialect import (
    EVENTS,
    BytesOf,
    ClientCall,
    ClientError,
    ClientRequest,
    Placed,
    count_in,
    flag_in,
    length_text,
    noted_fields,
    optional,
    order_answers,
    text_in,
    texts_in,
    to_json,
    typed,
)
from sparring.gateway.dialects.evidence import evidence_of
from sparring.gateway.dialects.freeform import UNREADABLE
from sparring.gateway.dialects.openai_errors import REQUEST_ID, write_error
from sparring.gateway.dialects.reply_format import format_in
from sparring.gateway.dialects.sampled_ids import thought_tokens, write_logprobs
from sparring.gateway.dialects.tool_choice import without_parallel
from sparring.reply import ReplyHead, SampledReply, calls_shown, text_shown
from sparring.types import Message, ReplyPiece

OBEYED = frozenset(
    "messages model tools tool_choice max_tokens max_completion_tokens stream stream_options n logprobs top_logprobs"
    " response_format stop".split()
)
NOTED = frozenset(
    "temperature top_p frequency_penalty presence_penalty seed user metadata store reasoning_effort verbosity"
    " parallel_tool_calls service_tier prompt_cache_key prompt_cache_retention safety_identifier"
    " top_k min_p repetition_penalty chat_template_kwargs enable_thinking thinking include_reasoning"
    " skip_special_tokens".split()
)
"""Fields that are accepted without effect. The last two lines are fields of servers of open models, such as vLLM."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


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
        noted = noted_fields(body, OBEYED, NOTED)
        messages = typed(body.get("messages"), "messages", list, "a list of messages")
        limits = [count_in(body, name) for name in ("max_completion_tokens", "max_tokens")]
        samples = optional(body, "n", int, "a whole number", 1)
        if not 1 <= samples <= 128:
            raise refusal("n", "from 1 to 128", str(samples), "correct the request")
        options = optional(body, "stream_options", dict, "settings of the stream", {})
        if optional(body, "top_logprobs", int, "a whole number", 0):
            raise refusal("top_logprobs", "0: the likeliest tokens are not sent", "more", "leave it out")
        format = format_in(body.get("response_format"), "response_format", inside="json_schema")
        tools, freeform = tools_in(body.get("tools"))
        forced, allowed = choice_in(body, tools)
        noted = without_parallel(noted, forced or allowed)
        places = [f"messages[{at}]" for at in range(len(messages))]
        conversation = [Placed(where, _read_message(data, where)) for where, data in zip(places, messages, strict=True)]
        return ClientRequest(
            messages=order_answers(conversation, "messages", replies_follow=True),
            tools=tools,
            calls=body.get("tool_choice") != "none",
            model=typed(body.get("model"), "model", str, "the name of a model"),
            max_tokens=limits[1] if limits[0] is None else limits[0],
            constraint=forced or format or allowed,
            samples=samples,
            stream=flag_in(body, "stream"),
            logprobs=flag_in(body, "logprobs"),
            counts=flag_in(options, "include_usage", "stream_options."),
            noted=noted,
            stop=texts_in([stop] if isinstance(stop := body.get("stop"), str) else stop, "stop"),
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


class ChunkWriter:
    """Writer of a streamed answer as chunks. Implements `AnswerWriter`."""

    content_type = EVENTS

    def __init__(self, client_request: ClientRequest, bytes_of: BytesOf) -> None:
        self._client_request = client_request
        self._bytes_of = bytes_of
        self._head: dict[str, Any] = {}
        self._num_calls: Counter[int] = Counter()
        self._shown: set[int] = set()
        self._replies: list[SampledReply] = []

    def begin(self, head: ReplyHead) -> bytes:
        """Write the role of every reply."""
        self._head = _head(self._client_request, head.id, "chat.completion.chunk")
        first = {"role": "assistant", "content": None, "refusal": None}
        return b"".join(self._event(sample, first) for sample in range(self._client_request.samples))

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        """Write a piece as the delta of a choice."""
        self._shown.add(sample)
        if piece.call is not None:
            number = self._num_calls[sample]
            self._num_calls[sample] += 1
            call = write_call(piece.call, self._client_request.echo["freeform"])
            return self._event(sample, {"tool_calls": [{"index": number, **call}]})
        return self._event(sample, {"reasoning_content" if piece.kind == "reasoning" else "content": piece.text})

    def end(self, sample: int, reply: SampledReply) -> bytes:
        """Write the log-probabilities and the finish reason of a choice."""
        self._replies.append(reply)
        last = self._event(sample, {}, _reason(reply))
        if sample not in self._shown:
            last = self._event(sample, {"content": ""}) + last
        if self._client_request.logprobs:
            last = self._event(sample, {}, logprobs=_logprobs(reply, self._bytes_of)) + last
        return last

    def close(self) -> bytes:
        """Write the usage, if the client asked for it, and the last line."""
        usage = b""
        if self._client_request.counts:
            usage = _event({**self._head, "choices": [], "usage": _usage(self._replies)})
        return usage + b"data: [DONE]\n\n"

    def fail(self, error: ClientError) -> bytes:
        """Write an error instead of a chunk."""
        return _event(ChatCompletions().error(error))

    def ping(self) -> bytes:
        """Write a comment, which clients ignore."""
        return b": ping\n\n"

    def _event(self, sample: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": sample, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        not_yet = {"usage": None} if self._client_request.counts else {}
        return _event({**self._head, "choices": [choice], **not_yet})


def _read_message(data: Any, where: str) -> Message:
    data = typed(data, where, dict, "a message")
    role = ROLES.get(str(data.get("role")))
    if role is None:
        raise refusal(f"{where}.role", f"one of {', '.join(ROLES)}", repr(data.get("role")), "correct the request")
    content = _text(data.get("content"), f"{where}.content")
    if role == "tool":
        id = typed(data.get("tool_call_id"), f"{where}.tool_call_id", str, "the id of a call")
        return Message(role="tool", content=content, tool_call_id=id.removeprefix(UNREADABLE))
    if role == "assistant":
        reasoning = data.get("reasoning_content") or data.get("reasoning")
        calls = typed(data.get("tool_calls") or [], f"{where}.tool_calls", list, "a list of calls")
        return Message(
            role="assistant",
            content=content,
            reasoning=None if reasoning is None else _text(reasoning, f"{where}.reasoning_content"),
            tool_calls=tuple(read_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)),
        )
    return Message(role="user" if role == "user" else "system", content=content)


def _text(content: Any, where: str) -> str:
    """Return the text of a content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return text_in(content, where)
    texts = []
    for at, part in enumerate(typed(content, where, list, "text, or a list of parts")):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise refusal(f"{where}[{at}]", "a part that is text", repr(kind), "this model reads text alone")
        texts.append(text_in(typed(part.get("refusal" if kind == "refusal" else "text"), where, str, "text"), where))
    return "".join(texts)


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


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"
