"""The OpenAPI document, and requests that are made from it: no fault of the server, nothing sampled for a refusal."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import jsonschema
import pytest
from sessions import RENDERER, said
from test_hostile_requests import CHAT, CONTENT, MESSAGE, RESPONSE

from sparring.gateway.openapi import document
from sparring.gateway.server import Door, open_door
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_task
from sparring.types import Limits

PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1beta/models/{model}:generateContent": CONTENT,
}
SAMPLING = (*PATHS, "/v1beta/models/{model}:streamGenerateContent")


@contextmanager
def door_on_a_thread() -> Iterator[tuple[Door, RecordedSession]]:
    """A session that always answers, behind a door that a client without an event loop can talk to."""
    tokens = reply_tokens(RENDERER, said("A"), [])
    limits = Limits(max_turns=10**6, max_tokens=10**9, max_tool_calls=10**6)
    recorder = Recorder(ScriptedEngine(lambda request: tokens), RENDERER, max_context=4000)
    session = recorder.open(toy_task(), rollout_id="rl/0/0", seed=7, limits=limits)
    opened: list[Door] = []
    is_open, close = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with open_door(session) as door:
            opened.append(door)
            is_open.set()
            await close.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert is_open.wait(60)
    try:
        yield opened[0], session
    finally:
        loop.call_soon_threadsafe(close.set)
        thread.join()
        loop.close()


def schema_of(path: str) -> Any:
    return document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_the_document_describes_the_requests_that_are_answered() -> None:
    for path, body in PATHS.items():
        if "contents" in body:  # a turn of calls has other parts
            body = {**body, "contents": body["contents"][:1]}
        jsonschema.validate(body, schema_of(path))
        with pytest.raises(jsonschema.ValidationError, match="were unexpected|was unexpected"):
            jsonschema.validate({**body, "a_new_field": 1}, schema_of(path))


def test_every_endpoint_of_the_document_exists() -> None:
    with door_on_a_thread() as (door, session), httpx.Client(base_url=door.url) as client:
        assert client.get("/openapi.json").json() == document()
        for path, operations in document()["paths"].items():
            for method, operation in operations.items():
                answer = client.request(
                    method,
                    path.format(model="policy", name="policy", id="lease"),
                    headers={"x-api-key": door.key},
                    json={},
                )
                assert str(answer.status_code) in operation["responses"], (method, path, answer.text)
                assert answer.json() is not None
    assert session.segments == ()


@pytest.mark.extra
def test_requests_made_from_the_document_are_answered_or_refused() -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    with door_on_a_thread() as (door, session):
        description = document()
        for path in SAMPLING[:3]:  # the names of models are the door's own matter
            body = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            body["properties"]["model"] = {"enum": ["policy", "other"]}
        schema = schemathesis.openapi.from_dict(description)
        schema.config.update(base_url=door.url)
        sampled, statuses = 0, set()
        modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in modes if operation.body else modes[:1]:

                @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: Any) -> None:
                    nonlocal sampled
                    before = session.usage.turns
                    answer = case.call(headers={"x-api-key": door.key})
                    statuses.add(answer.status_code)
                    assert answer.status_code < 500, answer.text
                    if answer.status_code != 200 or case.path not in SAMPLING:
                        assert session.usage.turns == before, "a refused request samples nothing"
                    sampled += session.usage.turns - before

                check()
        assert sampled and {200, 400} <= statuses
