"""Doors: where a client may put the key, and which model answers to a name."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sessions import opened, said, says

from sparring.errors import BadInput
from sparring.gateway.server import Door, open_door

BODY = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = {"model": "policy", "input": "Hi"}
MESSAGE = {**BODY, "max_tokens": 20}


def posted(session: Any, requests: list[tuple[str, dict[str, Any], Any]], **settings: Any) -> list[httpx.Response]:
    """Post requests, with `KEY` in their paths and headers replaced by the door's."""

    async def main() -> list[httpx.Response]:
        async with open_door(session, **settings) as door, httpx.AsyncClient(base_url=door.url) as client:
            return [await sent(client, door, *request) for request in requests]

    async def sent(client: httpx.AsyncClient, door: Door, path: str, headers: dict[str, str], body: Any) -> Any:
        named = {name: value.replace("KEY", door.key) for name, value in headers.items()}
        path = path.replace("KEY", door.key)
        return await (client.get(path, headers=named) if body is None else client.post(path, headers=named, json=body))

    return asyncio.run(main())


def test_a_key_may_stand_in_a_header_or_in_the_path() -> None:
    places: list[tuple[str, dict[str, str]]] = [
        ("/v1/chat/completions", {"authorization": "Bearer KEY"}),
        ("/v1/chat/completions", {"authorization": "KEY"}),
        ("/v1/chat/completions", {"x-api-key": "KEY"}),
        ("/v1/chat/completions", {"x-goog-api-key": "KEY"}),
        ("/v1/chat/completions?key=KEY", {}),
        ("/k/KEY/v1/chat/completions", {}),
        ("/k/KEY/v1/chat/completions", {"x-api-key": "KEY"}),
    ]
    session = opened(says(*(said("A") for _ in places)))
    answers = posted(session, [(path, headers, BODY) for path, headers in places])
    assert [answer.status_code for answer in answers] == [200] * len(places)


def test_a_missing_a_wrong_and_two_different_keys_are_refused() -> None:
    session = opened(says())
    requests = [
        ("/v1/chat/completions", {}, BODY),
        ("/v1/chat/completions", {"x-api-key": "sk-other"}, BODY),
        ("/k/KEY/v1/chat/completions", {"authorization": "Bearer sk-other"}, BODY),
        ("/k/sk-other/v1/responses", {}, RESPONSE),
        ("/v1/models", {}, None),
    ]
    answers = posted(session, requests)
    assert [answer.status_code for answer in answers] == [401] * 5 and session.segments == ()
    texts = [answer.json()["error"]["message"].partition("got ")[2].partition(";")[0] for answer in answers]
    other = "one of a rollout that is over, or of none"
    assert texts == ["none", other, "several that differ", other, "none"]


def test_a_model_name_selects_its_session() -> None:
    """An alias of the policy, a pattern, an auxiliary model with a session of its own."""
    policy, helper = opened(says(said("A"), said("B"), said("C"))), opened(says(said("D"), said("E")))
    models = {"claude-*": "policy", "haiku": helper, "claude-haiku-*": "haiku", "claude-haiku-5": "haiku"}
    names = ["policy", "claude-opus-5", "claude-haiku-4", "claude-haiku-5", "haiku"]
    requests: list[Any] = [("/v1/messages", {"x-api-key": "KEY"}, {**MESSAGE, "model": name}) for name in names]
    answers = posted(policy, [*requests, ("/v1/models", {"x-api-key": "KEY"}, None)], models=models)
    assert [answer.json()["content"][0]["text"] for answer in answers[:-1]] == ["A", "B", "C", "D", "E"]
    assert [answer.json()["model"] for answer in answers[:-1]] == names, "a client reads the name that it sent"
    listed = answers[-1].json()
    assert [row["id"] for row in listed["data"]] == ["policy", "haiku", "claude-haiku-5"]
    assert (listed["first_id"], listed["last_id"]) == ("policy", "claude-haiku-5")


def test_the_policy_answers_the_auxiliary_model_with_that_label() -> None:
    session = opened(says(said("A title"), said("Hello"), said("Again")))
    models = {"*-mini": "auxiliary", "*": "policy"}
    requests = [
        ("/v1/chat/completions", {"x-api-key": "KEY"}, {**BODY, "model": name})
        for name in ("gpt-9-mini", "gpt-9", "auxiliary")
    ]
    answers = posted(session, [*requests, ("/v1/models", {"x-api-key": "KEY"}, None)], models=models)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [row["id"] for row in answers[-1].json()["data"]] == ["policy"]
    sampled = [segment for segment in session.segments if segment.model is not None]
    assert [segment.label for segment in sampled] == ["auxiliary", "agent", "auxiliary"]


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    session = opened(says())
    requests: list[Any] = [
        ("/v1/chat/completions", {"x-api-key": "KEY"}, {**BODY, "model": "gpt-9"}),
        ("/v1/responses", {"x-api-key": "KEY"}, {**RESPONSE, "model": "gpt-9"}),
        ("/v1/messages", {"x-api-key": "KEY"}, {**MESSAGE, "model": "gpt-9"}),
        ("/v1/messages/count_tokens", {"x-api-key": "KEY"}, {**MESSAGE, "model": "gpt-9"}),
        ("/v1/models/gpt-9", {"x-api-key": "KEY", "anthropic-version": "2023-06-01"}, None),
        ("/v1/models/policy", {"x-api-key": "KEY"}, None),
    ]
    *refused, model = posted(session, requests, models={"o3": "policy", "claude-*": "policy"})
    assert [answer.status_code for answer in refused] == [404] * 5 and session.segments == ()
    errors = [answer.json()["error"] for answer in refused]
    assert [error.get("code", error["type"]) for error in errors] == [
        "model_not_found",
        "model_not_found",
        "not_found_error",
        "not_found_error",
        "not_found_error",
    ]
    assert all("expected one of policy" in error["message"] for error in errors)
    assert model.json()["id"] == "policy"


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ({"a": "b"}, "models.a: expected one of policy"),
        ({"a": "policy", "b": "a"}, "models.b: expected one of policy"),
        ({"policy": "policy"}, "models.policy: expected the rollout's own session"),
    ],
)
def test_an_invalid_table_of_models_is_refused(models: dict[str, str], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        posted(opened(says()), [], models=models)


def test_vendor_hosted_tools_are_refused_or_dropped() -> None:
    session = opened(says(said("A")))
    body = {**RESPONSE, "tools": [{"type": "web_search", "external_web_access": True}]}
    request = ("/v1/responses", {"x-api-key": "KEY"}, body)
    (refused,) = posted(session, [request])
    assert refused.status_code == 400 and session.segments == ()
    (answer,) = posted(session, [request], leave_out=("web_search",))
    assert answer.status_code == 200 and len(session.segments) == 2


def test_an_unknown_path_is_refused_in_the_vendors_format() -> None:
    session = opened(says())
    paths = ("/v1/responses/compact", "/k/KEY/v1/responses/compact", "/v1/embeddings")
    answers = posted(session, [(path, {"x-api-key": "KEY"}, {}) for path in paths])
    assert [answer.status_code for answer in answers] == [404] * 3 and session.segments == ()
    for answer in answers:
        assert "expected an endpoint of /openapi.json" in answer.json()["error"]["message"]
    (answer,) = posted(session, [("/chat/completions", {"x-api-key": "KEY"}, {})])
    assert answer.json()["error"]["message"].endswith("end the client's base URL with /v1")
