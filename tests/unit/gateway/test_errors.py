"""Errors name what the client sent, in its vendor's shape, and every answer has an id that the vendor's client reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from sessions import opened, said, says, with_openai
from test_doors import BODY, MESSAGE, posted
from test_streams import Stepping

from sparring.gateway.server import Door, open_door

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI = "/v1beta/models/policy:generateContent"
PLACES: dict[str, dict[str, str]] = {
    CHAT: {"authorization": "Bearer KEY"},
    RESPONSES: {"authorization": "Bearer KEY"},
    MESSAGES: {"x-api-key": "KEY"},
    GEMINI: {"x-goog-api-key": "KEY"},
}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
PARTS: dict[str, Any] = {"role": "user", "parts": [{"text": "Hi"}]}
ANSWER = {"role": "tool", "tool_call_id": "z", "content": "1"}
OUTPUT = {"type": "function_call_output", "call_id": "z", "output": "1"}
RESULT = {"type": "tool_result", "tool_use_id": "z", "content": "1"}


def asked(requests: list[tuple[str, Any]], session: Any = None, method: str = "POST") -> list[httpx.Response]:
    """Send requests of several vendors' clients, each with the key in its place."""

    async def main() -> list[httpx.Response]:
        async with open_door(session or opened(says())) as door, httpx.AsyncClient(base_url=door.url) as client:
            answers = []
            for path, body in requests:
                headers = {name: value.replace("KEY", door.key) for name, value in PLACES.get(path, {}).items()}
                answers.append(await client.request(method, path, json=body, headers=headers))
            return answers

    return asyncio.run(main())


def test_openais_client_reads_the_field_the_code_and_the_id_of_a_request() -> None:
    session = opened(says(said("A"), said("B"), said("C")))

    async def talk(client: Any, door: Door) -> Any:
        chat, responses = client.chat.completions, client.responses
        stranger = client.with_options(api_key="sk-none")
        lost = client.with_options(base_url=door.url)
        badly, worse = [USER, ANSWER], [USER, OUTPUT]
        errors = []
        for asking in (
            chat.create(model="policy", messages=badly),
            responses.create(model="policy", input=worse),
            chat.create(model="gpt-9", messages=[USER]),
            responses.create(model="gpt-9", input="Hi"),
            stranger.chat.completions.create(model="policy", messages=[USER]),
            stranger.responses.create(model="policy", input="Hi"),
            stranger.models.list(),
            client.embeddings.create(model="policy", input="Hi"),
            lost.chat.completions.create(model="policy", messages=[USER]),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await asking
            errors.append(caught.value)
        answers = [
            await chat.create(model="policy", messages=[USER]),
            await responses.create(model="policy", input="Hi"),
        ]
        raw = await chat.with_raw_response.create(model="policy", messages=[USER], stream=True)
        return errors, [answer._request_id for answer in answers] + [raw.headers["x-request-id"]]

    errors, ids = with_openai(session, talk)
    assert [(error.status_code, error.param, error.code) for error in errors] == [
        (400, "messages[1]", None),
        (400, "input[1]", None),
        (404, "model", "model_not_found"),
        (404, "model", "model_not_found"),
        (401, None, "invalid_api_key"),
        (401, None, "invalid_api_key"),
        (401, None, "invalid_api_key"),
        (404, None, None),
        (404, None, None),
    ]
    assert {error.type for error in errors} == {"invalid_request_error"}
    assert "end the client's base URL with /v1" in errors[-1].message
    ids += [error.request_id for error in errors]
    assert all(id.startswith("req_") for id in ids) and len({*ids}) == len(ids)


def test_a_wrong_key_has_one_error_for_each_vendor() -> None:
    other = [
        (path, {name: "Bearer sk-none" if "Bearer" in value else "sk-none"})
        for path, places in PLACES.items()
        for name, value in places.items()
    ]
    models = [
        ("/v1/models", {"authorization": "Bearer sk-none"}),
        ("/v1/models", {"x-api-key": "sk-none", "anthropic-version": "2023-06-01"}),
        ("/v1beta/models", {"x-goog-api-key": "sk-none"}),
    ]
    requests = [(path, headers, {}) for path, headers in other] + [(path, headers, None) for path, headers in models]
    answers = posted(opened(says()), requests)
    assert {answer.status_code for answer in answers} == {401}
    errors = [answer.json()["error"] for answer in answers]
    theirs = ("invalid_request_error", "invalid_api_key")
    for number in (0, 1, 4):
        assert (errors[number]["type"], errors[number]["code"], errors[number]["param"]) == (*theirs, None)
    assert [errors[number]["type"] for number in (2, 5)] == ["authentication_error"] * 2
    assert [(errors[number]["code"], errors[number]["status"]) for number in (3, 6)] == [(401, "UNAUTHENTICATED")] * 2


def shape_of(answer: httpx.Response) -> str:
    """Return whose shape an error has."""
    body = answer.json()
    if body.get("type") == "error":
        return "anthropic"
    return "google" if "status" in body["error"] else "openai" if "param" in body["error"] else "none"


def test_a_wrong_method_is_refused_in_the_format_of_the_paths_vendor() -> None:
    session = opened(says())
    shapes = {
        CHAT: "openai",
        MESSAGES: "anthropic",
        "/v1/messages/count_tokens": "anthropic",
        GEMINI: "google",
        "/v1beta/models": "google",
        "/v1/models": "openai",
        "/k/sk-x/v1/messages": "anthropic",
    }
    answers = asked([(path, {}) for path in shapes], session, method="PUT")
    assert {answer.status_code for answer in answers} == {405}
    assert [shape_of(answer) for answer in answers] == list(shapes.values())
    for answer in answers:
        assert answer.headers["allow"] and "method: expected" in answer.json()["error"]["message"]
    (got,) = asked([(CHAT, None)], session, method="GET")
    assert got.status_code == 405 and got.headers["allow"] == "POST" and got.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("path", "shape", "do"),
    [
        ("/v1/embeddings", "openai", "leave this request out"),
        ("/v1beta/models/policy:embedContent", "google", "leave this request out"),
        ("/v1/messages/batches", "anthropic", "leave this request out"),
        ("/chat/completions", "openai", "end the client's base URL with /v1"),
        ("/k/sk-x/responses", "openai", "end the client's base URL with /v1"),
        ("/v1/v1/messages", "anthropic", "leave /v1 out of the client's base URL"),
        ("/k/sk-x/v1/v1/messages", "anthropic", "leave /v1 out of the client's base URL"),
        ("/v1beta/v1beta/models/policy:generateContent", "google", "leave /v1beta out of the client's base URL"),
    ],
)
def test_an_unknown_path_is_refused_with_advice(path: str, shape: str, do: str) -> None:
    (answer,) = asked([(path, {})])
    assert answer.status_code == 404 and shape_of(answer) == shape
    error = answer.json()["error"]
    assert error["message"].endswith(do) and error.get("code") in (None, 404) and "sk-x" not in error["message"]


def test_every_response_has_the_vendors_request_id() -> None:
    session = opened(says(said("A"), said("B"), said("C")))
    contents = {"contents": [PARTS]}
    requests = [(CHAT, BODY), (MESSAGES, MESSAGE), (GEMINI, contents), (CHAT, {}), (MESSAGES, {}), (GEMINI, {})]
    names = [{"request-id", "x-request-id"} & answer.headers.keys() for answer in asked(requests, session)]
    assert names == [{"x-request-id"}, {"request-id"}, set()] * 2


def test_the_usage_stands_in_the_last_chunk_alone() -> None:
    reply = said("A", ("add", {"a": 1}))
    session = opened(says(reply, reply))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> list[list[Any]]:
        answers = []
        for options in ({"stream_options": {"include_usage": True}}, {}):
            values: Any = {"model": "policy", "messages": [USER], "stream": True, "logprobs": True, **options}
            answers.append([chunk async for chunk in await client.chat.completions.create(**values)])
        return answers

    counted, plain = with_openai(session, talk)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in counted[:-1])
    assert counted[-1].usage.completion_tokens and not counted[-1].choices
    assert len(counted) > 4 and not any("usage" in chunk.model_fields_set for chunk in plain)


def test_an_array_that_breaks_is_valid_json_with_the_error_at_its_end() -> None:
    """Also where the client was pinged before and between its elements."""
    engine = Stepping(said("Let me see what that is."))
    path = "/v1beta/models/policy:streamGenerateContent"

    async def main() -> str:
        async with open_door(opened(engine)) as door, httpx.AsyncClient(base_url=door.url) as client:
            door.ping_s, text = 0.001, ""
            headers = {"x-goog-api-key": door.key}
            async with client.stream("POST", path, json={"contents": [PARTS]}, headers=headers) as response:
                async for chunk in response.aiter_text():
                    text += chunk
                    engine.breaks = "candidates" in text
                    engine.let(1)
            return text

    text = asyncio.run(main())
    *elements, last = json.loads(text)
    assert text.startswith("\n") and "".join(_text(each) for each in elements).startswith("L")
    assert last["error"]["status"] == "UNAVAILABLE" and "the engine is gone" in last["error"]["message"]


def _text(chunk: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in chunk["candidates"][0]["content"]["parts"])


@pytest.mark.extra
def test_anthropics_client_reads_the_error_and_the_id_of_a_request() -> None:
    import anthropic

    session = opened(says(said("A"), said("B")))
    values: Any = {"model": "policy", "max_tokens": 20, "messages": [USER]}

    async def main() -> Any:
        async with open_door(session) as door:
            client = anthropic.AsyncAnthropic(base_url=door.url, api_key=door.key, max_retries=0)
            stranger, lost = client.with_options(api_key="sk-none"), client.with_options(base_url=f"{door.url}/v1")
            errors = []
            for asking in (
                client.messages.create(
                    **{**values, "system": "Be brief.", "messages": [USER, {**USER, "content": [RESULT]}]}
                ),
                client.messages.create(**{**values, "model": "claude-0"}),
                stranger.messages.create(**values),
                stranger.models.list(),
                lost.messages.create(**values),
            ):
                with pytest.raises(anthropic.APIStatusError) as caught:
                    await asking
                errors.append(caught.value)
            answer = await client.messages.create(**values)
            async with client.messages.stream(**values) as stream:
                await stream.until_done()
                return errors, [answer._request_id, stream.request_id]

    errors, ids = asyncio.run(main())
    assert [(error.status_code, error.body["error"]["type"]) for error in errors] == [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (401, "authentication_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
    ]
    assert "messages[1].content[0]: expected an answer" in errors[0].message
    assert "leave /v1 out of the client's base URL" in errors[-1].message
    ids += [error.request_id for error in errors]
    assert all(id.startswith("req_") for id in ids) and len({*ids}) == len(ids)


@pytest.mark.extra
def test_googles_client_reads_errors_and_continues_its_reply() -> None:
    from google import genai
    from google.genai import errors, types

    session = opened(says(said("Yes."), said("Yes."), said("Good.")))

    async def main() -> list[Any]:
        async with open_door(session) as door:
            options = types.HttpOptions(base_url=door.url)
            models = genai.Client(api_key=door.key, http_options=options).aio.models
            stranger = genai.Client(api_key="sk-none", http_options=options).aio.models
            hi: Any = types.Content(role="user", parts=[types.Part(text="Hi")])
            raised = []
            for asking in (
                stranger.generate_content(model="policy", contents=[hi]),
                models.generate_content(model="gemini-0", contents=[hi]),
                models.embed_content(model="policy", contents="Hi"),
            ):
                with pytest.raises(errors.ClientError) as caught:
                    await asking
                raised.append((caught.value.code, caught.value.status))
            first = [chunk async for chunk in await models.generate_content_stream(model="policy", contents=[hi])]
            await models.generate_content(model="policy", contents=[hi])
            parts = [part for chunk in first for part in chunk.candidates[0].content.parts]
            history = [hi, types.Content(role="model", parts=parts), hi]
            await models.generate_content(model="policy", contents=history)
            return raised

    assert asyncio.run(main()) == [(401, "UNAUTHENTICATED"), (404, "NOT_FOUND"), (404, "NOT_FOUND")]
    assert session.segments[3].parent == 1, "the first of two equal replies, which its handle names"
