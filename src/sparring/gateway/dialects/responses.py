"""OpenAI's Responses: `POST /v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.constraints import format_in
from sparring.gateway.dialects.dialect import BytesOf, ClientCall, ClientError, ClientRequest, Placed, order_answers
from sparring.gateway.dialects.evidence import evidence_of
from sparring.gateway.dialects.fields import typed
from sparring.gateway.dialects.forms import INCLUDED, NOT_MADE, ResponsesForm, form_in
from sparring.gateway.dialects.handles import reply_named
from sparring.gateway.dialects.openai import REQUEST_ID, read_choice, without_parallel, write_error
from sparring.gateway.dialects.response_events import ResponseWriter, response_of
from sparring.gateway.dialects.response_items import conversation_in, replies_referenced
from sparring.gateway.dialects.response_tools import name_of, tools_in
from sparring.reply import SampledReply
from sparring.types import Message

TOO_LONG = "Your input exceeds the context window of this model. Please adjust your input and try again."
"""Vendor's error message for a prompt that is too long."""


class Responses:
    """Dialect of OpenAI's Responses. Implements `Dialect`."""

    path = "/v1/responses"
    request_id = REQUEST_ID

    def read(self, call: ClientCall) -> ClientRequest:
        body = call.body
        form, noted = form_in(body, ResponsesForm)
        if form.background:
            raise refusal("background", "false", "true", "leave it out")
        instructions = form.instructions
        conversation, handle = _conversation(call, form, anew=bool(instructions))
        tools, forms = tools_in(form.tools, call.leave_out)
        forced, allowed = read_choice(body, tools, partial(name_of, forms))
        noted = without_parallel(noted, forced or allowed)
        for at, name in enumerate(form.include):
            if name not in INCLUDED | NOT_MADE:
                expected = f"one of {', '.join(sorted(INCLUDED | NOT_MADE))}"
                raise refusal(f"include[{at}]", expected, repr(name), "leave it out")
        return ClientRequest(
            messages=_unchecked_messages(conversation, instructions)
            if not form.generate
            else order_answers(conversation, "input", instructions, replies_follow=True),
            tools=tools,
            calls=form.tool_choice != "none",
            model=form.model,
            max_tokens=form.max_output_tokens,
            constraint=forced or format_in(form.text.get("format"), "text.format") or allowed,
            stream=form.stream,
            logprobs="message.output_text.logprobs" in form.include,
            noted=noted,
            evidence=evidence_of(call, noted, handle),
            samples_nothing=not form.generate,
            echo={
                "forms": forms,
                "sealed": "reasoning.encrypted_content" in form.include,
                "fields": {name: body[name] for name in _ECHOED & body.keys() if body[name] is not None},
            },
        )

    def answer(
        self, client_request: ClientRequest, replies: Sequence[SampledReply], bytes_of: BytesOf
    ) -> dict[str, Any]:
        (reply,) = replies
        return response_of(client_request, reply, bytes_of)

    def writer(self, client_request: ClientRequest, bytes_of: BytesOf) -> ResponseWriter:
        return ResponseWriter(client_request, bytes_of)

    def error(self, error: ClientError) -> dict[str, Any]:
        return write_error(error, "input", "" if error.too_long is None else TOO_LONG)


_ECHOED = frozenset(
    "instructions metadata tools tool_choice parallel_tool_calls max_output_tokens previous_response_id reasoning"
    " store temperature text top_p truncation user top_logprobs service_tier safety_identifier prompt_cache_key"
    " max_tool_calls".split()
)
"""Fields of a request that its answer repeats."""


def replies_named(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of the replies whose conversations are needed to read a request."""
    items = body.get("input")
    return _previous_reply(body.get("previous_response_id")) | replies_referenced(
        items if isinstance(items, list) else ()
    )


def _previous_reply(id: object) -> frozenset[str]:
    """Return the id of the reply that a response id names, as a set; empty if the response id names no reply."""
    return frozenset((reply_named(id.removeprefix("resp_")),)) - {""} if isinstance(id, str) else frozenset()


def _unchecked_messages(conversation: Sequence[Placed], instructions: str) -> tuple[Message, ...]:
    system = [Message(role="system", content=instructions)] if instructions else []
    return (*system, *(placed.message for placed in conversation))


def _conversation(call: ClientCall, form: ResponsesForm, anew: bool) -> tuple[list[Placed], str]:
    """Return the messages of a request, and the id of the reply that the client wants to continue (empty if not given).

    Args:
        anew: whether the request has instructions, which replace the instructions of the earlier conversation.
    """
    conversation: list[Placed] = []
    input, previous, before = form.input, form.previous_response_id, ""
    if previous is not None:
        before = next(iter(_previous_reply(previous)), "")
        earlier = call.conversation(before) if before else None
        if earlier is None:
            got, do = json.dumps(previous), "send the whole input"
            raise refusal("previous_response_id", "the id of a response under this key", got, do)
        if anew and earlier and earlier[0].role == "system":
            earlier = earlier[1:]
        conversation = [Placed("previous_response_id", message) for message in earlier]
    if isinstance(input, str):
        return [*conversation, Placed("input", Message(role="user", content=input))], before
    items = [] if input is None and previous is not None else typed(input, "input", list, "text or a list of items")
    new, handle = conversation_in(items, call.conversation)
    return [*conversation, *new], handle or before
