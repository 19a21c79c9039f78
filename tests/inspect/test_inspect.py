"""inspect_ai's own checks of a sandbox, over our boxes; run by make test-inspect, in an environment of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

self_check = pytest.importorskip("inspect_ai.util._sandbox.self_check")
globals().update({name: getattr(self_check, name) for name in self_check.__all__})

pytestmark = [pytest.mark.inspect, pytest.mark.anyio]
TWO_USERS = ("test_exec_as_user",)
"""A box has one user."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    from sparring.sandbox.for_inspect import InspectBox

    name = request.node.originalname
    if name in TWO_USERS:
        request.node.add_marker(pytest.mark.xfail(reason="a box has one user", strict=True))
    await InspectBox.task_init(name, None)
    environments = await InspectBox.sample_init(name, None, {})
    yield environments["default"]
    await InspectBox.sample_cleanup(name, None, environments, False)
    await InspectBox.task_cleanup(name, None, True)


def test_there_are_as_many_checks_as_we_know() -> None:
    assert len(self_check.__all__) == 44
