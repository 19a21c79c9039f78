"""claude-code as it is published, its tools run for real, on a scripted policy: what it sends continues what was
sampled."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from sparring.gateway.server import open_door
from sparring.generation import GenerateRequest
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, ToolCall

pytestmark = pytest.mark.harness

PROGRAM = Path(os.environ.get("SPARRING_HARNESSES", ".harnesses")).absolute() / "node_modules/.bin/claude"
RENDERER = toy_renderer()


def says(content: str, *calls: tuple[str, dict[str, Any]]) -> Message:
    tool_calls = tuple(
        ToolCall(id=f"call_{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=content, tool_calls=tool_calls)


def agent(folder: Path, *replies: Message) -> tuple[int, str, RecordedSession, ScriptedEngine]:
    """Let claude-code work in a folder; return its exit status, its answer, the record and the engine."""
    left = iter(replies)

    def script(request: GenerateRequest) -> tuple[int, ...]:
        return reply_tokens(RENDERER, next(left))

    engine = ScriptedEngine(script)
    limits = Limits(max_turns=50, max_tokens=100_000, max_tool_calls=50)
    recorder = Recorder(engine, RENDERER, max_context=400_000)
    session = recorder.open(toy_task(), rollout_id="rl/0/0", seed=7, limits=limits)
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()

    async def main() -> tuple[int, str]:
        async with open_door(session) as door:
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "ANTHROPIC_BASE_URL": door.url,
                "ANTHROPIC_API_KEY": door.key,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "ENABLE_TOOL_SEARCH": "false",  # tools that are loaded later are refused
                "IS_SANDBOX": "1",
            }
            words = ("-p", "Do it.", "--model", "policy", "--dangerously-skip-permissions")
            process = await asyncio.create_subprocess_exec(
                str(PROGRAM), *words, cwd=work, env=environment, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            return process.returncode or 0, out.decode()

    status, text = asyncio.run(main())
    return status, text, session, engine


def prompts(session: RecordedSession) -> list[tuple[int, ...]]:
    """The prompt of each sampled reply, of the record."""
    segments = session.segments
    found = []
    for segment in segments:
        path, at = [], segment.parent
        while segment.model is not None and at is not None:
            path.append(segments[at].tokens)
            at = segments[at].parent
        found += [tuple(token for tokens in reversed(path) for token in tokens)] if path else []
    return found


def test_a_conversation_with_tools_is_one_line_of_sampled_ids(tmp_path: Path) -> None:
    """Parallel answers come in the order in which they are done, and arguments as JavaScript writes them."""
    file = tmp_path / "work/a.txt"
    status, text, session, engine = agent(
        tmp_path,
        says("I look.", ("Bash", {"command": f"echo one > {file}; cat {file}", "timeout": 10000.0})),
        says("", ("Bash", {"command": "sleep 1; echo two"}), ("Read", {"file_path": str(file)})),
        says("All done."),
    )
    assert (status, text.strip()) == (0, "All done.")
    assert file.read_text() == "one\n", "its tools ran"
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, 3, 4], "one branch"
    assert prompts(session) == [request.tokens for request in engine.requests]
    last = RENDERER.decode(engine.requests[-1].tokens)
    assert last.rindex("two") < last.rindex("one"), "answers stand in the order of the calls"


def test_a_tool_that_fails_and_one_that_is_not_there_are_the_policys_to_see(tmp_path: Path) -> None:
    status, text, session, engine = agent(
        tmp_path,
        says("", ("Read", {"file_path": "/none/at/all"})),
        says("", ("Wish", {"for": "more"})),
        says("I give up."),
    )
    assert (status, text.strip()) == (0, "I give up.")
    assert prompts(session) == [request.tokens for request in engine.requests]
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, 3, 4]
