"""Evidence of a request beside its conversation: which agent asks, whose child it is, what for, what it continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientCall, Dialect
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.handles import handle_of, reply_named
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses
from sparring.types import Evidence

HI = [{"role": "user", "content": "Hi"}]


def evidence(dialect: Dialect, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> Evidence:
    return dialect.read(ClientCall(body=body, headers=headers)).evidence


def test_claude_codes_agents_name_themselves() -> None:
    body = {"model": "policy", "messages": HI, "temperature": 1, "metadata": {"user_id": "u"}}
    headers = {"x-claude-code-agent-id": "a1", "x-claude-code-parent-agent-id": "a0"}
    assert evidence(Messages(), body, headers) == Evidence(
        agent="a1", parent="a0", wishes={"metadata": {"user_id": "u"}, "temperature": 1}
    )


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("main", None),
        ("subagent", None),
        ("workflow", None),
        ("compaction", "compaction"),
        ("auxiliary", "auxiliary"),
        ("side_reply", "auxiliary"),
    ],
)
def test_claude_code_labels_its_requests(kind: str, label: str | None) -> None:
    headers = {"x-claude-code-request-class": kind}
    assert evidence(Messages(), {"model": "policy", "messages": HI}, headers).label == label


@pytest.mark.parametrize(("kind", "label"), [("turn", None), ("compaction", "compaction")])
def test_codex_names_its_thread_and_labels_its_requests(kind: str, label: str | None) -> None:
    headers = {
        "thread-id": "t2",
        "x-codex-parent-thread-id": "t1",
        "x-codex-turn-metadata": json.dumps({"request_kind": kind, "thread_id": "t2"}),
    }
    seen = evidence(Responses(), {"model": "policy", "input": "Hi", "store": False}, headers)
    assert (seen.agent, seen.parent, seen.label) == ("t2", "t1", label)


def test_opencodes_session_is_an_agent() -> None:
    assert evidence(ChatCompletions(), {"model": "policy", "messages": HI}, {"x-session-id": "s"}).agent == "s"


@pytest.mark.parametrize("metadata", ["", "{", "3", '{"request_kind": 3}'])
def test_malformed_metadata_is_ignored(metadata: str) -> None:
    headers = {"x-codex-turn-metadata": metadata}
    assert evidence(Responses(), {"model": "policy", "input": "Hi"}, headers) == Evidence()


def test_a_handle_names_the_reply_that_a_request_continues() -> None:
    handle = handle_of("rl/12/3#5")
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": handle}
    answered = [*HI, {"role": "assistant", "content": [thinking]}, *HI]
    assert evidence(Messages(), {"model": "policy", "messages": answered}).handle == "rl/12/3#5"
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": handle}
    assert evidence(Responses(), {"model": "policy", "input": [*HI, reasoning, *HI]}).handle == "rl/12/3#5"
    item = {"type": "message", "id": f"msg_{handle}.0", "role": "assistant", "content": "A"}
    assert evidence(Responses(), {"model": "policy", "input": [*HI, item, *HI]}).handle == "rl/12/3#5"
    call = {"functionCall": {"name": "add", "args": {}}, "thoughtSignature": handle}
    answer = {"functionResponse": {"name": "add", "response": {}}}
    contents = [{"role": "model", "parts": [call]}, {"role": "user", "parts": [answer]}]
    assert evidence(Gemini(), {"contents": contents}).handle == "rl/12/3#5"


def test_handles_of_other_vendors_name_no_reply() -> None:
    handle = handle_of("rl/12/3#5")
    for text in ("", "gAAAAABo", handle[:-4], handle[4:], "é", None, 3, f"{handle} "):
        assert reply_named(text) == ""
