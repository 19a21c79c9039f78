"""`/mcp` against the conformance suite of the Model Context Protocol, @modelcontextprotocol/conformance."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from doors import door_on_a_thread

from sparring.errors import PolicyFailure
from sparring.types import Message, ToolCall, ToolSpec

pytestmark = pytest.mark.suites
SUITES = Path(__file__).parents[2] / ".suites/node_modules"
EMPTY = {"type": "object", "properties": {}}
NESTED = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}},
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}
HELD = (
    "server-initialize",
    "ping",
    "tools-list",
    "tools-call-simple-text",
    "tools-call-error",
    "json-schema-2020-12",
    "server-sse-multiple-streams",
    "dns-rebinding-protection",
)
"""Scenarios of what a world has: tools that answer with text. docs/suites.md names the others."""


class World:
    """The suite's own tools, as far as a world has such; implements `protocols.ToolHost`."""

    tools = (
        ToolSpec(name="test_simple_text", description="Say a sentence.", parameters=EMPTY),
        ToolSpec(name="test_error_handling", description="Fail.", parameters=EMPTY),
        ToolSpec(name="json_schema_2020_12_tool", description="Take a name and an address.", parameters=NESTED),
    )

    async def call(self, call: ToolCall) -> str:
        if call.name == "test_error_handling":
            raise PolicyFailure("This tool intentionally returns an error for testing")
        return "This is a simple text response for testing."


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with door_on_a_thread(Message(role="assistant", content="Hello."), World()) as (door, _):
        yield f"{door.url}/k/{door.key}/mcp"


@pytest.mark.parametrize("scenario", HELD)
def test_a_scenario_of_what_a_world_has(scenario: str, address: str, tmp_path: Path) -> None:
    [node] = SUITES.glob("node-linux-*/bin/node")
    suite = SUITES / "@modelcontextprotocol/conformance/dist/index.js"
    command = [node, suite, "server", "--url", address, "--scenario", scenario, "--suite", "all", "-o", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    [checks] = [json.loads(file.read_text()) for file in tmp_path.glob("**/checks.json")]
    assert checks, done.stdout + done.stderr
    failed = [check for check in checks if check["status"] not in ("SUCCESS", "INFO", "SKIPPED")]
    assert not failed, json.dumps(failed, indent=1)
