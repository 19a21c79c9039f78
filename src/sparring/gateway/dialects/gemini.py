"""Google's Gemini: `POST /v1beta/models/{model}:generateContent`, `:streamGenerateContent` and `:countTokens`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.constraints import JSON_OBJECT, allowed_calls, forced_call, schema_in
from sparring.gateway.dialects.dialect import (
    AnswerWriter,
    BytesOf,
    ClientCall,
    ClientError,
    ClientRequest,
    order_answers,
    thought_tokens,
)
from sparring.gateway.dialects.evidence import evidence_of
from sparring.gateway.dialects.fields import optional, texts_in, to_json, typed
from sparring.gateway.dialects.forms import ConfigForm, GeminiForm, form_in, names_in
from sparring.gateway.dialects.gemini_contents import conversation_in, json_schema, text_of, tools_in, with_call_ids
from sparring.gateway.dialects.gemini_fields import NESTED, in_one_spelling
from sparring.gateway.dialects.handles import handle_of
from sparring.generation import Constraint
from sparring.record.identity import shown_arguments
from sparring.reply import ReplyHead, SampledReply, pieces_of
from sparring.types import ReplyPiece, ToolCall, ToolSpec

FIELDS = GeminiForm.NOTED | ConfigForm.NOTED | NESTED | names_in(GeminiForm) | names_in(ConfigForm)
"""Fields that are read in both spellings; other fields keep their spelling for the refusal."""

TOO_LONG = "The input token count ({}) exceeds the maximum number of tokens allowed ({})."
"""Error message that makes clients compact the conversation."""

CALLING = "toolConfig.functionCallingConfig"
"""Field with the mode of tool calls."""

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


class Gemini:
    """Dialect of Google's Gemini. Implements `Dialect`.

    Args:
        streams: whether answers are streamed, which depends on the path of a request.
    """

    request_id = ""

    def __init__(self, streams: bool = False) -> None:
        self._streams = streams
        self.path = f"/v1beta/models/{{model}}:{'streamGenerateContent' if streams else 'generateContent'}"

    def read(self, call: ClientCall) -> ClientRequest:
        body: dict[str, Any] = in_one_spelling(call.body, FIELDS)
        body = optional(body, "generateContentRequest", dict, "a request", body)  # countTokens wraps its request
        form, noted = form_in(body, GeminiForm)
        config, noted_settings = form_in(form.generation_config, ConfigForm, "generationConfig.")
        noted += noted_settings
        system = "" if form.system_instruction is None else text_of(form.system_instruction, "systemInstruction")
        contents, handle = conversation_in(form.contents)
        tools = tools_in(form.tools, call.leave_out)
        samples, modalities = config.candidate_count, config.response_modalities
        if samples > 8 or samples > 1 and self._streams:
            raise refusal("generationConfig.candidateCount", "1 in a stream, else up to 8", str(samples), "lower it")
        if modalities not in ([], ["TEXT"]):
            raise refusal("generationConfig.responseModalities", '["TEXT"]', json.dumps(modalities), "leave it out")
        calling = optional(form.tool_config, "functionCallingConfig", dict, "settings", {}, "toolConfig.")
        forced, allowed = _choice(calling, tools)
        return ClientRequest(
            messages=order_answers(with_call_ids(contents), "contents", system),
            tools=tools,
            calls=calling.get("mode") != "NONE",
            model=call.path.get("model", ""),
            max_tokens=config.max_output_tokens,
            constraint=forced or _constraint(config) or allowed,
            samples=samples,
            stream=self._streams,
            logprobs=config.response_logprobs,
            noted=noted,
            stop=texts_in(config.stop_sequences, "generationConfig.stopSequences"),
            evidence=evidence_of(replace(call, body=body), noted, handle),
            echo={"as_events": "sse" in (call.query.get("alt"), call.query.get("$alt"))},
        )

    def answer(
        self, client_request: ClientRequest, replies: Sequence[SampledReply], bytes_of: BytesOf
    ) -> dict[str, Any]:
        candidates = []
        for index, reply in enumerate(replies):
            handle = handle_of(reply.id)
            parts = [_part(piece, handle) for piece in pieces_of(reply.message)] or [{"text": ""}]
            parts[-1]["thoughtSignature"] = handle
            candidate = _candidate(parts, index, _reason(reply))
            if client_request.logprobs:
                candidate["logprobsResult"] = _logprobs(reply, bytes_of)
            candidates.append(candidate)
        return {"candidates": candidates, **_tail(client_request, replies)}

    def writer(self, client_request: ClientRequest, bytes_of: BytesOf) -> AnswerWriter:
        return (GeminiWriter if client_request.echo["as_events"] else ArrayWriter)(client_request, bytes_of)

    def error(self, error: ClientError) -> dict[str, Any]:
        status = STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
        text = error.message if error.too_long is None else TOO_LONG.format(*error.too_long)
        return {"error": {"code": error.status, "message": text, "status": status}}


class GeminiWriter(AnswerWriter):
    """Writer of a streamed answer as server-sent events (`alt=sse`); every chunk has the shape of a complete answer."""

    def __init__(self, client_request: ClientRequest, bytes_of: BytesOf) -> None:
        self._client_request = client_request
        self._bytes_of = bytes_of
        self._handle = ""
        self._id = ""

    def begin(self, head: ReplyHead) -> bytes:
        self._handle, self._id = handle_of(head.id), head.id
        return b""

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        candidate = _candidate([_part(piece, self._handle)], sample)
        named = {"modelVersion": self._client_request.model, "responseId": self._id}
        return self._chunk({"candidates": [candidate], **named})

    def end(self, sample: int, reply: SampledReply) -> bytes:
        candidate = _candidate([{"text": "", "thoughtSignature": self._handle}], sample, _reason(reply))
        if self._client_request.logprobs:
            candidate["logprobsResult"] = _logprobs(reply, self._bytes_of)
        return self._chunk({"candidates": [candidate], **_tail(self._client_request, [reply])})

    def fail(self, error: ClientError) -> bytes:
        return self._chunk(Gemini().error(error))

    def ping(self) -> bytes:
        return self._chunk({})  # not a comment: clients of this vendor read every line as data

    def _chunk(self, data: Mapping[str, Any]) -> bytes:
        return b"data: " + to_json(data) + b"\r\n\r\n"


class ArrayWriter(GeminiWriter):
    """Writer of the chunks of `GeminiWriter` as elements of a JSON array, for clients that do not ask for server-sent
    events. Implements `AnswerWriter`."""

    content_type = "application/json; charset=utf-8"
    _before = b"["

    def close(self) -> bytes:
        return b"]"

    def fail(self, error: ClientError) -> bytes:
        return super().fail(error) + b"]"

    def ping(self) -> bytes:
        return b"\n"

    def _chunk(self, data: Mapping[str, Any]) -> bytes:
        before, self._before = self._before, b",\n"
        return before + to_json(data)


def _choice(calling: Mapping[str, Any], tools: Sequence[ToolSpec]) -> tuple[Constraint | None, Constraint | None]:
    """Read the choice of tools.

    Returns:
        Constraint of a reply that must call, and constraint of a reply that may only make valid calls of some tools;
        each None if it does not apply.

    Raises:
        BadInput: the mode or a name is unknown.
    """
    mode, where = calling.get("mode") or "AUTO", f"{CALLING}.allowedFunctionNames"
    names = typed(calling.get("allowedFunctionNames") or [], where, list, "a list of names")
    if mode == "ANY":
        return forced_call(tools, names or None, where=where if names else f"{CALLING}.mode"), None
    if mode == "VALIDATED":
        named = names or [tool.name for tool in tools]
        return None, allowed_calls(tools, named, validated=True, where=where) if named else None
    if mode not in ("AUTO", "NONE", "MODE_UNSPECIFIED"):
        raise refusal(f"{CALLING}.mode", "AUTO, ANY, VALIDATED or NONE", repr(mode), "leave it out: the policy decides")
    if names:
        do = "leave it out, or let the mode be ANY or VALIDATED"
        raise refusal(where, f"none where the mode is {mode}", json.dumps(names), do)
    return None, None


def _constraint(config: ConfigForm) -> Constraint | None:
    kind = config.response_mime_type or "text/plain"
    if kind not in ("text/plain", "application/json"):
        where = "generationConfig.responseMimeType"
        raise refusal(where, "text/plain or application/json", repr(kind), "correct the request")
    schemas = {"responseJsonSchema": config.response_json_schema, "responseSchema": config.response_schema}
    for name, schema in schemas.items():
        if schema is not None:
            where = f"generationConfig.{name}"
            return schema_in(json_schema(schema, where), where)
    return None if kind == "text/plain" else JSON_OBJECT


def _part(piece: ReplyPiece, handle: str) -> dict[str, Any]:
    if piece.call is not None:
        call: ToolCall = piece.call
        function = {"id": call.id, "name": call.name, "args": dict(shown_arguments(call))}
        return {"functionCall": function, "thoughtSignature": handle}
    return {"text": piece.text, **({"thought": True} if piece.kind == "reasoning" else {})}


def _candidate(parts: list[dict[str, Any]], index: int, reason: str | None = None) -> dict[str, Any]:
    ended = {} if reason is None else {"finishReason": reason}
    return {"content": {"role": "model", "parts": parts}, "index": index, **ended}


def _reason(reply: SampledReply) -> str:
    return "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"


def _tail(client_request: ClientRequest, replies: Sequence[SampledReply]) -> dict[str, Any]:
    sampled, prompt = sum(len(reply.tokens) for reply in replies), replies[0].prompt_tokens
    thoughts = thought_tokens(replies)  # the vendor counts them separately, and omits 0
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": sampled - (thoughts or 0)}
    usage |= {"thoughtsTokenCount": thoughts} if thoughts else {}
    usage["totalTokenCount"] = prompt + sampled
    return {
        "usageMetadata": {**usage, "cachedContentTokenCount": replies[0].cached_tokens},
        "modelVersion": client_request.model,
        "responseId": replies[0].id,
    }


def _logprobs(reply: SampledReply, bytes_of: BytesOf) -> dict[str, Any]:
    chosen = [
        {"token": bytes_of(token).decode("utf-8", "replace"), "tokenId": token, "logProbability": logprob}
        for token, logprob in zip(reply.tokens, reply.logprobs, strict=bool(reply.logprobs))
    ]
    return {"chosenCandidates": chosen}
