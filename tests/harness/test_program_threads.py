"""Clients whose tools and conversations grow while they run: tools of the world, tools that are loaded, sub-agents."""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import RENDERER, Played, play, says
from clients import NAMED, variant

from sparring.types import Message, ToolSpec

pytestmark = pytest.mark.harness
WEIGH = ToolSpec(
    name="weigh",
    description="Weigh a thing.",
    parameters={"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("claude-code", "mcp__world__weigh"),
        ("codex", "mcp__world__weigh"),
        ("gemini-cli", "mcp_world_weigh"),
        ("qwen-code", "mcp__world__weigh"),
        ("opencode", "world_weigh"),
    ],
)
def test_a_worlds_tools_are_an_mcp_server_under_the_same_key(preset: str, name: str) -> None:
    played = play(preset, [says("", (name, {"thing": "stone"})), says("All done.")], tools=(WEIGH,))
    assert (played.ending, played.turns, played.exact) == ("answered", 2, 1.0), played.note
    assert "weigh: {'thing': 'stone'}" in played.prompt(-1), "the world answered"


def test_two_subagents_that_send_equal_bytes_are_two_samples_beside_their_parent() -> None:
    """claude-code runs them beside the parent, which hears of each when it is done."""
    task = ("Agent", {"description": "sub", "prompt": "SUBTASK", "subagent_type": "general-purpose"})

    def script(prompt: str) -> Message:
        if '"prompt": "SUBTASK"' in prompt:
            return says("All done.")
        return says("Sub done.") if "SUBTASK" in prompt else says("", task, task)

    played = play("claude-code", script)
    assert (played.ending, played.exact) == ("answered", 1.0), played.note
    subagents = [s for s in played.segments if s.model is not None and "Sub done." in RENDERER.decode(s.tokens)]
    assert len(subagents) == 2 and len({segment.parent for segment in subagents}) == 1, "two samples of one prompt"
    assert played.roots == 2, "the parent's conversation and the sub-agents'"


def agents_of(played: Played) -> list[str]:
    """Return why each conversation but the first began, in the order of requests."""
    return [segment.fork.reason for segment in played.segments if segment.fork is not None]


SEARCH = ('ENABLE_TOOL_SEARCH = "false"', 'ENABLE_TOOL_SEARCH = "true"')


def test_tools_that_claude_code_loads_are_no_fork_and_can_be_called(tmp_path: Path) -> None:
    """They stand in the list of a later request, whose prompt is the one before it and the answer that loads them."""
    preset = variant("claude-code", tmp_path, SEARCH)
    cell = {"notebook_path": "/box/a.ipynb", "new_source": "1"}
    played = play(
        preset,
        [
            says("I look.", ("ToolSearch", {"query": "select:NotebookEdit,WebFetch"})),
            says("", ("NotebookEdit", cell), ("Bash", {"command": "echo 42 > answer.txt"})),
            says("", ("ToolSearch", {"query": "select:CronList"})),
            says("All done."),
        ],
    )
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    assert (played.turns, played.roots, played.branches) == (4, 1, 1)
    assert '"name": "NotebookEdit"' not in played.prompt(0), "it is in the prompt from the answer on that loads it"
    assert '"name": "NotebookEdit", "description"' in played.prompt(1)
    assert '"name": "CronList", "description"' in played.prompt(3) and "No such tool" not in played.prompt(3)
    whole = play("claude-code", [says("All done.")])
    assert len(played.engine.requests[0].tokens) < 0.7 * len(whole.engine.requests[0].tokens)


def test_a_worlds_tool_that_claude_code_loads_is_answered_by_the_world(tmp_path: Path) -> None:
    name = "mcp__world__weigh"
    played = play(
        variant("claude-code", tmp_path, SEARCH),
        [
            says("", ("ToolSearch", {"query": f"select:{name}"})),
            says("", (name, {"thing": "stone"})),
            says("All done."),
        ],
        tools=(WEIGH,),
    )
    assert (played.ending, played.turns, played.exact) == ("answered", 3, 1.0), played.note
    assert (played.roots, played.branches) == (1, 1)
    assert "Weigh a thing." not in played.prompt(0) and "Weigh a thing." in played.prompt(1)
    assert "weigh: {'thing': 'stone'}" in played.prompt(-1), "the world answered"


NESTED = (
    '"agent": {"title": {"disable": true}}',
    '"subagent_depth": 2, "agent": {"title": {"disable": true}, "general": {"permission": {"task": "allow"}}}',
)


@pytest.mark.parametrize(
    ("preset", "tool", "kind", "changes"),
    [("claude-code", "Agent", "general-purpose", ()), ("opencode", "task", "general", (NESTED,))],
)
def test_subagents_of_subagents_are_one_agents_branch_each(
    preset: str, tool: str, kind: str, changes: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    """The policy starts one, which starts another, which runs a command; each hears of the next one's end."""
    shell = NAMED[preset]

    def told(task: str, prompt: str) -> bool:
        return task in prompt and f'"prompt": "{task}' not in prompt

    def starts(task: str) -> Message:
        return says("", (tool, {"description": "sub", "prompt": task, "subagent_type": kind}))

    def script(prompt: str) -> Message:
        if told("INNER TASK", prompt):
            done = "ANSWERED" in prompt
            return says("The inner one is done.") if done else shell.runs("echo 42 > answer.txt; echo ANSWER''ED")
        if told("OUTER TASK", prompt):
            return says("The outer one is done.") if '"prompt": "INNER TASK' in prompt else starts("INNER TASK")
        return says("All done.") if '"prompt": "OUTER TASK' in prompt else starts("OUTER TASK")

    played = play(variant(preset, tmp_path, *changes), script)
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    assert (played.roots, played.branches) == (3, 3), "a branch for each agent"
    assert agents_of(played) == ["agent", "agent"]
    assert {segment.label for segment in played.segments if segment.model is not None} == {"agent"}
    begun = [segment for segment in played.segments if segment.fork is not None]
    assert len({segment.fork.agent for segment in begun if segment.fork}) == 2, "two agents, by their client's word"


def test_a_title_that_opencode_asks_for_is_auxiliary(tmp_path: Path) -> None:
    """The preset names the model of its small calls; titles, which it switches off, are switched on here."""

    def script(prompt: str) -> Message:
        if "You are a title generator" in prompt:
            return says("An answer in a file")
        return (
            says("All done.")
            if "<tool_response>" in prompt
            else says("", ("bash", {"command": "echo 42 > answer.txt"}))
        )

    played = play(variant("opencode", tmp_path, ('"agent": {"title": {"disable": true}}, ', "")), script)
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    assert sorted(s.label for s in played.segments if s.model is not None) == ["agent", "agent", "auxiliary"]


HOOK = """[files]
".claude/settings.json" = '{"hooks": {"Stop": [{"hooks": [{"type": "prompt", "prompt": "JUDGE: is it done?"}]}]}}'

[with_tools]
"""


def test_small_calls_of_claude_code_are_auxiliary_whatever_model_they_ask_for(tmp_path: Path) -> None:
    """They ask for the alias that sub-agents have too. Labels of tool calls and a judge at the end are switched on here."""
    labels = ('IS_SANDBOX = "1"', 'CLAUDE_CODE_EMIT_TOOL_USE_SUMMARIES = "1"\nIS_SANDBOX = "1"')
    work = NAMED["claude-code"].runs("echo 42 > answer.txt; echo ANSWER''ED")
    task = ("Agent", {"description": "sub", "prompt": "SUBTASK", "subagent_type": "general-purpose", "model": "haiku"})

    def script(prompt: str) -> Message:
        if "Tools completed:" in prompt:
            return says("Wrote the answer.")
        if "JUDGE" in prompt:
            return says('{"ok": true}')
        if "SUBTASK" in prompt and '"prompt": "SUBTASK' not in prompt:
            return says("Sub done.") if "ANSWERED" in prompt else work
        return says("All done.") if "SUBTASK" in prompt else says("", task)

    played = play(variant("claude-code", tmp_path, labels, ("[with_tools]\n", HOOK)), script)
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    said = {RENDERER.decode(s.tokens): s.label for s in played.segments if s.model is not None}
    small = {text: label for text, label in said.items() if "Wrote the answer." in text or "ok" in text}
    assert len(small) >= 2 and set(small.values()) == {"auxiliary"}, said
    assert {label for text, label in said.items() if text not in small} == {"agent"}, "sub-agents are trained"
