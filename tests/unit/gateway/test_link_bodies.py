"""What the process of a gateway notes at the run's: a refused request and a key, and bodies that are none."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from sessions import opened, says

from sparring.errors import BadInput, InfraError, LimitReached, SparringError
from sparring.gateway.keys import WrongKey
from sparring.gateway.link import CallForm, KeyForm, decode, encode
from sparring.gateway.link_server import ERROR, MOST_NOTE, LinkServer
from sparring.gateway.reading import Overflow
from sparring.gateway.server import Gateway
from sparring.record.session import RequestAccount


def told(*requests: tuple[str, Any]) -> tuple[list[Any], RequestAccount]:
    """The answers to some requests, an error as it is raised in the gateway; `KEY` is the door's. And the account of
    its session."""

    async def main() -> tuple[list[Any], RequestAccount]:
        gateway, session, answers = Gateway(), opened(says()), []
        door = await gateway.open(session)
        link = httpx.ASGITransport(LinkServer(gateway, print).application())
        async with httpx.AsyncClient(transport=link, base_url="http://run") as client:
            for path, form in requests:
                body = form if isinstance(form, bytes) else encode(form).replace(b"KEY", door.key.encode())
                answer = await client.post(path, content=body)
                assert answer.status_code in (200, ERROR), answer.text
                failed = answer.status_code == ERROR
                answers.append(decode(answer.content, SparringError) if failed else answer.content)
        await gateway.shut(door)
        return answers, session.account

    return asyncio.run(main())


def call(*arguments: Any) -> CallForm:
    return CallForm(key="KEY", arguments=msgspec.Raw(encode(arguments)))


def test_a_request_that_was_refused_unread_is_recorded_with_its_limit() -> None:
    limit = Overflow("9 messages", 3000)
    (answer,), account = told(("/overflow", call(limit)))
    assert answer == b"null"
    noted = account.limit
    assert isinstance(noted, LimitReached) and not isinstance(noted, Overflow)
    assert (noted.reason, noted.too_long, str(noted)) == (limit.reason, limit.too_long, str(limit))


def test_known_keys_are_recognised() -> None:
    (known, other), _ = told(("/known", KeyForm(key="KEY")), ("/known", KeyForm(key="sk-other")))
    assert known == b"" and isinstance(other, WrongKey)


@pytest.mark.parametrize("path", ["/overflow", "/known", "/end", "/hear"])
def test_malformed_bodies_are_refused(path: str) -> None:
    too_long = encode(KeyForm(key="x" * MOST_NOTE))
    answers, account = told((path, b""), (path, b"{"), (path, b"[]"), (path, b"\xff"), (path, b"{}"), (path, too_long))
    assert all(isinstance(answer, BadInput) for answer in answers) and account.limit is None
    assert all(f"POST {path}: expected a" in str(answer) for answer in answers[:5])


def test_an_overflow_must_be_a_limit() -> None:
    forms = [call(InfraError("x")), call(["of tomorrow", "x", "", None]), call("x"), call()]
    answers, account = told(*(("/overflow", form) for form in forms))
    assert all(isinstance(answer, BadInput) for answer in answers) and account.limit is None
