"""A coroutine from plain code, in a running loop and without one."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from sparring.launch.block import block


async def fails() -> None:
    raise ZeroDivisionError


def test_an_error_is_the_first_thing_of_its_traceback() -> None:
    """Without a loop, and within one as in a notebook."""

    async def inside() -> None:
        block(fails())

    for call in (lambda: block(fails()), lambda: asyncio.run(inside())):
        with pytest.raises(ZeroDivisionError) as raised:
            call()
        assert "no running event loop" not in "".join(traceback.format_exception(raised.value))
