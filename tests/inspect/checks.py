"""inspect_ai's own checks of a sandbox, over our boxes; run by test_inspect.py in an environment that has the package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from sparring.sandbox.for_inspect import InspectBox

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    task = request.node.name
    await InspectBox.task_init(task, None)
    environments = await InspectBox.sample_init(task, None, {})
    yield environments["default"]
    await InspectBox.sample_cleanup(task, None, environments, False)
    await InspectBox.task_cleanup(task, None, True)
