"""What no model can answer is refused in its vendor's own shape, in every dialect, before anything is sampled."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sessions import ADD, opened, said, says, through

from sparring.gateway.server import Door

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI = "/v1beta/models/policy:generateContent"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
REPLY: dict[str, Any] = {"role": "assistant", "content": "Yes."}
PARTS: dict[str, Any] = {"role": "user", "parts": [{"text": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": [USER]},
    RESPONSES: {"model": "policy", "input": "Hi"},
    MESSAGES: {"model": "policy", "max_tokens": 5, "messages": [USER]},
    GEMINI: {"contents": [PARTS]},
}

WIZARD = {"role": "wizard", "content": "A"}
CHAT_CALL = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f"}}]}
CHAT_ANSWER = {"role": "tool", "tool_call_id": "x", "content": "B"}
CALL = {"type": "function_call", "call_id": "call_0_0", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "z", "output": "1"}
TEXT = {"type": "text", "text": "Hi"}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "1"}
LOADING = {"type": "tool_result", "tool_use_id": "s", "content": [{"type": "tool_reference", "tool_name": "multiply"}]}
LOADED = [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "s", "name": "find", "input": {}}]}]
GOOGLE_CALL = {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {}}}]}
GOOGLE_ANSWER = {"functionResponse": {"name": "add", "response": {"result": "3"}}}
FUNCTION = {"type": "function", **ADD["function"]}
TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}
DECLARED = {"functionDeclarations": [{"name": "add"}]}
NO_REPLY = "expected a message to reply to at the end"
NO_CALL = "expected an answer to a call of the reply before it"
NOT_OBEYED = "expected a field that can be obeyed"

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHAT: [
        ({"messages": []}, f"messages: {NO_REPLY}"),
        ({"messages": [CHAT_CALL]}, "messages[0]: expected answers to its calls"),
        ({"messages": [WIZARD]}, "messages[0].role: expected one of system"),
        ({"messages": [USER, {**USER, "content": [{"type": "image_url"}]}]}, "messages[1].content[0]: expected a part"),
        ({"messages": [USER, CHAT_ANSWER]}, f"messages[1]: {NO_CALL}"),
        ({"messages": [USER, REPLY, USER, CHAT_ANSWER]}, f"messages[3]: {NO_CALL}"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name: expected a name"),
        ({"tool_choice": "required"}, "tool_choice: expected a tool"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"n": 0.5}, "n: expected an integer, got 0.5"),
        ({"n": 0}, "n: expected from 1 to 128, got 0"),
        ({"stream": "false"}, "stream: expected true or false"),
        ({"logit_bias": {"1": 2}}, f"logit_bias: {NOT_OBEYED}"),
        ({"response_format": {"type": "xml"}}, "response_format.type: expected text"),
        ({"model": None}, "model: expected a string, got nothing"),
    ],
    RESPONSES: [
        ({"input": []}, f"input: {NO_REPLY}"),
        ({"input": None}, "input: expected text"),
        ({"input": [USER, CALL]}, "input[1]: expected answers to its calls"),
        ({"input": [WIZARD]}, "input[0].role: expected one of system"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]: expected a part"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0].type: expected message, reasoning"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id: expected the id of an item of a reply"),
        ({"instructions": "Be brief.", "input": [USER, OUTPUT]}, f"input[1]: {NO_CALL}"),
        ({"input": [CALL, {"type": "custom_tool_call_output", "call_id": "y"}]}, f"input[1]: {NO_CALL}"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name: expected a name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: expected function, custom or namespace"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters: expected a JSON"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1]: expected tools"),
        ({"tool_choice": "wizard"}, "tool_choice: expected"),
        ({"max_output_tokens": 0}, "max_output_tokens: expected at least 1"),
        ({"background": True}, "background: expected false"),
        ({"stream": "false"}, "stream: expected true or false"),
        ({"include": ["foo"]}, "include[0]: expected one of"),
        ({"conversation": "c"}, f"conversation: {NOT_OBEYED}"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: expected text"),
        ({"previous_response_id": "resp_none"}, "previous_response_id: expected the id of a response under this key"),
    ],
    MESSAGES: [
        ({"messages": []}, f"messages: {NO_REPLY}"),
        ({"system": "Be brief.", "messages": []}, f"messages: {NO_REPLY}"),
        ({"messages": [USER, REPLY]}, f"messages: {NO_REPLY}"),
        ({"messages": [WIZARD]}, "messages[0].role: expected user, assistant or system, got 'wizard'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: expected a block"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, f"messages[0].content[0]: {NO_CALL}"),
        (
            {"system": "Be brief.", "messages": [USER, REPLY, {**USER, "content": [TEXT, RESULT]}]},
            f"messages[2].content[1]: {NO_CALL}",
        ),
        (
            {"messages": [*LOADED, {"role": "user", "content": [LOADING]}]},
            "expected a tool of the request whose loading",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "expected a tool that the client runs"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: expected a JSON schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1]: expected tools"),
        ({"tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name: expected the name of a tool"),
        ({"stop_sequences": [""]}, "stop_sequences: expected texts that are not empty"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: expected json_schema"),
        ({"output_config": "high"}, 'output_config: expected an object, got "high"'),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"stream": "false"}, "stream: expected true or false"),
    ],
    GEMINI: [
        ({"contents": []}, f"contents: {NO_REPLY}"),
        ({"contents": None}, "contents: expected a list"),
        ({"contents": "hi"}, "contents: expected a list"),
        ({"contents": [GOOGLE_CALL]}, f"contents: {NO_REPLY}, got a reply"),
        ({"contents": [PARTS, {**PARTS, "role": "model"}]}, f"contents: {NO_REPLY}"),
        ({"contents": [{"role": "wizard", "parts": []}]}, "contents[0].role: expected user, model or function"),
        ({"contents": [{"parts": [{"inlineData": {}}]}]}, "contents[0].parts[0]: expected a part that is text"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]: expected a part"),
        ({"contents": [{"parts": [GOOGLE_ANSWER]}]}, f"contents[0].parts[0]: {NO_CALL}"),
        ({"contents": [GOOGLE_CALL, {"parts": [GOOGLE_ANSWER, GOOGLE_ANSWER]}]}, NO_CALL),
        (
            {
                "systemInstruction": {"parts": [{"text": "Brief."}]},
                "contents": [PARTS, {"parts": [{"text": "A"}, GOOGLE_ANSWER]}],
            },
            f"contents[1].parts[1]: {NO_CALL}",
        ),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch: expected functionDeclarations"),
        ({"tools": [DECLARED, DECLARED]}, "expected functions"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": 3}]}]},
            "tools[0].functionDeclarations[0].parameters: exp",
        ),
        ({"cachedContent": "c"}, f"cachedContent: {NOT_OBEYED}"),
        ({"generationConfig": {"speechConfig": {}}}, f"generationConfig.speechConfig: {NOT_OBEYED}"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens: expected at least 1"),
        ({"generationConfig": {"candidateCount": 9}}, "generationConfig.candidateCount: expected 1 in a stream"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities: expected"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "expected text/plain or application/json"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "MANY"}}},
            "toolConfig.functionCallingConfig.mode: expected",
        ),
    ],
}


def unreadable(path: str) -> list[tuple[bytes, str]]:
    """Bodies that are no JSON, of a request that could be answered."""
    body = json.dumps(BODIES[path])
    others = (
        b"",
        b"[]",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        body[:-1].encode(),
        body.encode().replace(b"Hi", b"\xff"),
    )
    return [
        *((data, "body: expected a JSON object") for data in others),
        (body[:-1].encode() + b', "temperature": NaN}', "got NaN"),
        (body[:-1].encode() + b', "temperature": 1e999}', "got 1e999"),
        (body.replace("Hi", "\\ud800").encode(), "half of a surrogate"),
    ]


CASES = [
    *(
        (path, json.dumps({**BODIES[path], **change}).encode(), text)
        for path in REFUSED
        for change, text in REFUSED[path]
    ),
    *((path, data, text) for path in BODIES for data, text in unreadable(path)),
]


def message_of(path: str, answer: dict[str, Any]) -> str:
    """Check that an error has the shape of the vendor, and return its message."""
    error = answer["error"]
    message = str(error["message"])
    if path == MESSAGES:
        assert answer["type"] == "error" and error["type"] == "invalid_request_error"
    elif path == GEMINI:
        assert error["code"] == 400 and error["status"] == "INVALID_ARGUMENT"
    else:
        field = message.partition(":")[0]
        assert error["type"] == "invalid_request_error" and error["code"] is None
        assert error["param"] == (None if field == "body" else field), "the field that the client sent"
    return message


@pytest.mark.parametrize("streams", [False, True])
def test_bad_input_gets_the_vendors_error_before_sampling(streams: bool) -> None:
    engine = says(said("A"))
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> list[httpx.Response]:
        answers = []
        for path, content, _ in CASES:
            if streams and path == GEMINI:
                path = path.replace(":generateContent", ":streamGenerateContent")
            elif streams and b'"stream"' not in content:
                content = content.replace(b"{", b'{"stream": true, ', 1)
            answers.append(await client.post(path, content=content))
        return answers

    for (path, content, text), answer in zip(CASES, through(session, talk), strict=True):
        assert answer.status_code == 400, (path, content[:200], answer.text)
        message = message_of(path, answer.json())
        assert text in message and (": " not in text or message.startswith(text)), (path, content[:200], message)
    assert not engine.requests and not session.segments
