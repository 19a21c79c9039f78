"""Published programs on the formats of other models: their messages, their tools and the calls of them."""

from __future__ import annotations

from typing import Any

import pytest
from agents import PROGRAMS, play
from clients import CLIENTS, NAMED, Client, plain
from formats import FORMATS, NO_TOOLS, format_renderer
from harmony import harmony_renderer

from sparring.errors import BadInput
from sparring.render.round_trip import check_tool_calls
from sparring.testing.toy import toy_renderer
from sparring.types import ToolSpec

pytestmark = pytest.mark.harness
VOCABULARY = "venv/lib/*/site-packages/litellm/litellm_core_utils/tokenizers/fb374d41*"
"""The vocabulary of gpt-oss, which one of the libraries brings along."""

OF_ONE = ("qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5")
"""Formats that take one system message, at the beginning, and write text arguments between tags."""


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", [*OF_ONE, "kimi-k2.5"])
@pytest.mark.parametrize("preset", ["claude-code", "codex"])
def test_a_program_plays_on_a_format_that_takes_one_system_message(preset: str, name: str, thinking: bool) -> None:
    """Both send several at the beginning, and claude-code one in mid-conversation; kimi-k2.5 declares their tools."""
    client = NAMED[preset]
    renderer = format_renderer(name, thinking, "kept" if thinking else "template")
    played = plain(client, renderer=renderer)
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    assert (played.turns, played.exact, played.roots, played.branches) == (3, 1.0, 1, 1)
    last = played.prompt(-1)
    assert last.rindex("uno") < last.rindex("dos"), "answers stand in the order of the calls"
    if name in OF_ONE:
        assert last.count("<|im_start|>system\n") == 1 and last.index("<|im_start|>system\n") == 0


@pytest.mark.parametrize("preset", ["claude-code", "codex"])
def test_a_format_of_one_call_without_text_has_the_tools_behind_one_system_message(preset: str) -> None:
    client = NAMED[preset]
    replies = [client.runs("cat question.txt"), client.runs("echo 42 > answer.txt"), client.ends("All done.")]
    played = play(preset, replies, renderer=format_renderer("llama-3"))
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    assert (played.turns, played.exact, played.roots, played.branches) == (3, 1.0, 1, 1)


def tools_of(client: Client) -> tuple[ToolSpec, ...]:
    """The tools of a program's requests."""
    played = play(client.preset, lambda prompt: client.ends("All done."))
    sent = {tool.name: tool for segment in played.segments for tool in segment.tools or ()}
    assert sent, played.note
    return tuple(sent.values())


def renderers() -> dict[str, Any]:
    """The renderer of every format, by its name."""
    vocabulary = next(iter(PROGRAMS.glob(VOCABULARY)))
    made = {name: format_renderer(name) for name in FORMATS}
    return {**made, "template": toy_renderer(name="template"), "gpt-oss": harmony_renderer(vocabulary)}


SLOW = ("deepseek-v4", "hy3", "laguna-s-2.1", "laguna-xs-2.1")
"""Formats that the library reads or writes in seconds a tool: the first programs' tools alone are tried there."""


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.preset)
def test_the_tools_of_a_program_are_declared_and_called_in_every_format(client: Client) -> None:
    tools = tools_of(client)
    refused = set()
    for name, renderer in renderers().items():
        if name in SLOW and len(tools) > 4:
            continue
        try:
            check_tool_calls(renderer, tools)
        except BadInput as refusal:
            assert name in NO_TOOLS, f"{name}: {refusal}"
            refused.add(name)
    assert refused == set(NO_TOOLS), "they have no place for tools"
