"""Which requests are equal."""

from __future__ import annotations

from sparring.gateway.dialects.dialect import ClientRequest
from sparring.gateway.exchange import request_digest
from sparring.types import Evidence

HUGE = 1 << 70


def test_the_order_of_fields_and_streaming_do_not_change_the_digest() -> None:
    """codex orders a map of its own anew at each attempt."""
    asked = ClientRequest(messages=(), tools=(), model="policy")
    body = {"input": "Hi", "client_metadata": {"thread": "a", "turn": "b"}, "stream": True}
    again = {"client_metadata": {"turn": "b", "thread": "a"}, "input": "Hi"}
    assert request_digest("/v1", body, asked) == request_digest("/v1", again, asked)
    big, again = {"a": {"x": HUGE, "y": 1}}, {"a": {"y": 1, "x": HUGE}}
    assert request_digest("/v1", big, asked) == request_digest("/v1", again, asked), "integers of any size"
    other = ClientRequest(messages=(), tools=(), model="policy", evidence=Evidence(agent="b"))
    digests = {request_digest("/v1", body, asked), request_digest("/v1", body, other), request_digest("/v1", {}, asked)}
    assert len(digests) == 3, "another agent, another text"
