"""Anthropic's Messages: `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialect import (
    ClientCall,
    ClientRequest,
    Decode,
    arguments_of,
    encoded,
    in_order,
    sorted_fields,
    text_in,
    typed,
)
from sparring.reply import ReplyHead, SampledReply
from sparring.types import Message, ReplyPiece, ToolCall, ToolSpec

OBEYED = frozenset("messages model system tools tool_choice max_tokens stream".split())
NOTED = frozenset(
    "temperature top_p top_k metadata thinking service_tier context_management output_config betas container"
    " inference_geo speed cache_control".split()
)
BILLING = "x-anthropic-billing-header"
"""First words of a system block by which claude-code counts; it changes between agents and says nothing to a model."""

NOT_CACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
"""Usage of a prompt of which nothing was cached."""

TOO_LONG = "prompt is too long: "
"""First words by which clients know that they have to compact."""


class Messages:
    """Dialect of Anthropic's Messages. Implements `Dialect`."""

    path = "/v1/messages"

    def read(self, call: ClientCall) -> ClientRequest:
        """Read a request.

        Raises:
            BadInput: it is malformed, or asks for what cannot be had.
        """
        body = call.body
        noted = sorted_fields(body, OBEYED, NOTED)
        messages: list[Message] = []
        system = _system(body.get("system"))
        if system:
            messages.append(Message(role="system", content=system))
        for at, message in enumerate(typed(body.get("messages"), "messages", list, "a list of messages")):
            messages += _messages(message, f"messages[{at}]")
        most = body.get("max_tokens")
        if most is not None and typed(most, "max_tokens", int, "a whole number") < 1:
            raise refusal("max_tokens", "at least 1", str(most), "raise it")
        return ClientRequest(
            messages=in_order(messages),
            tools=_tools(body),
            model=typed(body.get("model"), "model", str, "the name of a model"),
            max_tokens=most,
            stream=bool(body.get("stream")),
            noted=noted,
        )

    def answer(self, client_request: ClientRequest, replies: Sequence[SampledReply], decode: Decode) -> dict[str, Any]:
        """Write the answer."""
        (reply,) = replies
        return {
            **_head(client_request, reply.id),
            "content": _blocks(reply.message),
            "stop_reason": _reason(reply),
            "usage": _usage(reply),
        }

    def writer(self, client_request: ClientRequest, decode: Decode) -> EventWriter:
        """Open the writer of one streamed answer."""
        return EventWriter(client_request)

    def error(self, status: int, message: str, *, too_long: bool = False) -> dict[str, Any]:
        """Write an error."""
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
        kind, text = kinds.get(status, "api_error"), f"{TOO_LONG}{message}" if too_long else message
        return {"type": "error", "error": {"type": kind, "message": text}}

    def error_event(self, status: int, message: str) -> bytes:
        """Write an error that comes when the answer has begun."""
        return _event("error", self.error(status, message))

    def ping(self) -> bytes:
        """Write the event that says that the answer is under way."""
        return _event("ping", {})


class EventWriter:
    """Writer of one answer as events: blocks one after the other. Implements `AnswerWriter`."""

    def __init__(self, client_request: ClientRequest) -> None:
        self._client_request = client_request
        self._num_blocks = 0
        self._open = ""  # the kind of the block that is open

    def begin(self, head: ReplyHead) -> bytes:
        """Write the head of the message. What was cached is known at its end."""
        usage = {"input_tokens": head.prompt_tokens, "output_tokens": 1}
        head_sent = {**_head(self._client_request, head.id), "content": [], "stop_reason": None}
        return _event("message_start", {"message": {**head_sent, "usage": {**NOT_CACHED, **usage}}})

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        """Write a piece of the reply into its block."""
        call = piece.call
        if call is not None and call.arguments is not None:
            empty = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": arguments_of(call)}
            return self._block("tool_use", empty) + self._delta(delta) + self._closed()
        if piece.kind == "reasoning":
            begun = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begun + self._delta({"type": "thinking_delta", "thinking": piece.text})
        begun = self._block("text", {"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": piece.text if call is None else call.raw})

    def end(self, sample: int, reply: SampledReply) -> bytes:
        """Write the end of the last block, why the message ended, and the usage."""
        empty = b"" if self._num_blocks else self._block("text", {"type": "text", "text": ""})
        ended = {"stop_reason": _reason(reply), "stop_sequence": None}
        last = _event("message_delta", {"delta": ended, "usage": _usage(reply)})
        return empty + self._closed() + last + _event("message_stop", {})

    def close(self) -> bytes:
        """Write nothing: the end of the one reply was the end."""
        return b""

    def _block(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Begin a block, unless one of this kind is open."""
        if self._open == kind:
            return b""
        closed, self._open = self._closed(), kind
        self._num_blocks += 1
        return closed + _event("content_block_start", {"index": self._num_blocks - 1, "content_block": empty})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _closed(self) -> bytes:
        """End the block that is open."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signature = self._delta({"type": "signature_delta", "signature": ""}) if kind == "thinking" else b""
        return signature + _event("content_block_stop", {"index": self._num_blocks - 1})


def _system(system: Any) -> str:
    """Return the text of `system`, which may stand in blocks."""
    if system is None or isinstance(system, str):
        return text_in(system or "", "system")
    texts = [_text(block, f"system[{at}]") for at, block in enumerate(typed(system, "system", list, "text or blocks"))]
    return "\n\n".join(text for text in texts if not text.startswith(BILLING))


def _text(block: Any, where: str) -> str:
    kind = typed(block, where, dict, "a block").get("type")
    if kind != "text":
        raise refusal(where, "a block of text", repr(kind), "this model reads text alone")
    return text_in(typed(block.get("text"), f"{where}.text", str, "text"), where)


def _messages(data: Any, where: str) -> list[Message]:
    """Return the messages of one: answers of tools stand by themselves, before the text beside them."""
    data = typed(data, where, dict, "a message")
    role, content = data.get("role"), data.get("content")
    if role not in ("user", "assistant", "system"):
        raise refusal(f"{where}.role", "user, assistant or system", repr(role), "correct the request")
    if isinstance(content, str):
        return [Message(role=role, content=text_in(content, f"{where}.content"))]
    blocks = typed(content, f"{where}.content", list, "text or blocks")
    if role == "assistant":
        return [_reply(blocks, where)]
    answers, texts = [], []
    for at, block in enumerate(blocks):
        place = f"{where}.content[{at}]"
        if typed(block, place, dict, "a block").get("type") == "tool_result":
            id = typed(block.get("tool_use_id"), f"{place}.tool_use_id", str, "the id of a call")
            answers.append(Message(role="tool", content=_answer(block.get("content"), place), tool_call_id=id))
        else:
            texts.append(_text(block, place))
    return [*answers, *([Message(role=role, content="".join(texts))] if texts or not answers else [])]


def _answer(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return text_in(content or "", where)
    return "".join(_text(block, where) for block in typed(content, where, list, "text or blocks"))


def _reply(blocks: Sequence[Any], where: str) -> Message:
    """Return a reply as the client sends it back."""
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(blocks):
        place = f"{where}.content[{at}]"
        kind = typed(block, place, dict, "a block").get("type")
        if kind == "thinking":
            thoughts.append(text_in(typed(block.get("thinking"), place, str, "text"), place))
        elif kind == "tool_use":
            name = typed(block.get("name"), f"{place}.name", str, "a name")
            arguments = typed(block.get("input"), f"{place}.input", dict, "the arguments")
            calls.append(
                ToolCall(id=typed(block.get("id"), f"{place}.id", str, "an id"), name=name, arguments=arguments)
            )
        elif kind != "redacted_thinking":
            texts.append(_text(block, place))
    return Message(
        role="assistant", content="".join(texts), reasoning="".join(thoughts) or None, tool_calls=tuple(calls)
    )


def _tools(body: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
    if choice not in ("auto", "none"):
        raise refusal("tool_choice", "auto or none", repr(choice), "leave it out: the policy decides")
    specs = []
    for at, tool in enumerate(typed(body.get("tools") or [], "tools", list, "a list of tools")):
        where = f"tools[{at}]"
        if typed(tool, where, dict, "a tool").get("type") not in (None, "custom"):
            do = "switch it off: nobody runs it"
            raise refusal(f"{where}.type", "a tool that the client runs", repr(tool["type"]), do)
        if tool.get("defer_loading"):
            raise refusal(f"{where}.defer_loading", "false", "true", "switch the client's tool search off")
        name = typed(tool.get("name"), f"{where}.name", str, "a name")
        schema = typed(tool.get("input_schema"), f"{where}.input_schema", dict, "a JSON schema")
        specs.append(ToolSpec(name=name, description=tool.get("description") or "", parameters=schema))
    return () if choice == "none" else tuple(specs)


def _blocks(message: Message) -> list[dict[str, Any]]:
    """Return the blocks of a reply. A call that does not parse is text, because a block has parsed arguments."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        if call.arguments is not None:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
        elif blocks and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += call.raw
        else:
            blocks.append({"type": "text", "text": call.raw})
    return blocks or [{"type": "text", "text": ""}]


def _reason(reply: SampledReply) -> str:
    if reply.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if any(call.arguments is not None for call in reply.message.tool_calls) else "end_turn"


def _head(client_request: ClientRequest, id: str) -> dict[str, Any]:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": client_request.model,
        "stop_sequence": None,
    }


def _usage(reply: SampledReply) -> dict[str, Any]:
    return {
        **NOT_CACHED,
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": len(reply.tokens),
    }


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encoded({"type": name, **data}))
