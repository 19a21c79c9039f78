"""The clients of the matrix: each preset with its shell tool, and the scripted conversations that are played with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents import RENDERER, Cuts, Played, Reply, play, says

from sparring.harness.preset import FOLDER
from sparring.types import Message

SUMMARY = "The question was read, and the answer 42 is to be written into the file."
LONG = " ".join(f"thought {number} of many," for number in range(200))


@dataclass(frozen=True)
class Compaction:
    """What it takes until a client compacts: words of its request for a summary, the tags that it wants around that,
    the length of its context in ids, and the characters of each answer that fills it."""

    asks: str
    context: int
    characters: int
    tag: str = "summary"


@dataclass(frozen=True)
class Client:
    """A preset, the name and argument of its shell tool, the dialect that it speaks, its package, whether it writes its
    own history anew, how it compacts (None: it does not), and the call by which it ends (name, argument, value; None:
    it ends with a reply that calls nothing)."""

    preset: str
    shell: str
    argument: str = "command"
    dialect: str = "chat completions"
    package: str = ""
    edits: bool = False
    compaction: Compaction | None = None
    last: tuple[str, str, str] | None = None

    def runs(self, *commands: str, content: str = "", **more: Any) -> Message:
        """A reply that runs commands side by side."""
        return says(content, *((self.shell, {self.argument: command, **more}) for command in commands))

    def ends(self, content: str) -> Message:
        """The reply by which the program ends."""
        if self.last is None:
            return says(content)
        name, argument, value = self.last
        return says(content, (name, {argument: value}))


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Command by which mini-swe-agent knows that it is done."""

CLIENTS = (
    Client(
        "claude-code",
        "Bash",
        dialect="messages",
        package="@anthropic-ai/claude-code",
        compaction=Compaction("Respond with TEXT ONLY", 120_000, 25_000),
    ),
    Client(
        "pi",
        "bash",
        package="@mariozechner/pi-coding-agent",
        compaction=Compaction("a context summarization assistant", 30_000, 6000),
    ),
    Client(
        "codex",
        "exec_command",
        "cmd",
        dialect="responses",
        package="@openai/codex",
        compaction=Compaction("CONTEXT CHECKPOINT COMPACTION", 60_000, 8000),
    ),
    Client("gemini-cli", "run_shell_command", dialect="gemini", package="@google/gemini-cli"),
    Client(
        "qwen-code",
        "run_shell_command",
        package="@qwen-code/qwen-code",
        compaction=Compaction("the component that summarizes a conversation", 100_000, 12_000, "state_snapshot"),
    ),
    Client(
        "opencode",
        "bash",
        package="opencode-ai",
        compaction=Compaction("a context summarization agent", 60_000, 8000),
    ),
    Client("mini-swe-agent", "bash", package="mini-swe-agent", last=("bash", "command", SUBMIT)),
    Client("openai-agents", "bash", package="openai-agents"),
    Client("openai-agents-responses", "bash", dialect="responses", package="openai-agents"),
    Client("langgraph", "bash", package="langgraph"),
    Client("langgraph-anthropic", "bash", dialect="messages", package="langgraph"),
    Client("pydantic-ai", "bash", package="pydantic-ai-slim"),
    Client("smolagents", "bash", package="smolagents", edits=True, last=("final_answer", "answer", "Done.")),
)
NAMED = {client.preset: client for client in CLIENTS}


def plain(client: Client, **settings: Any) -> Played:
    """Calls, of which two stand side by side and the second is done first, and the end; settings are those of
    `play`."""
    replies = [
        client.runs("cat question.txt", content="I look."),
        client.runs("sleep 0.5; echo 42 > answer.txt; echo uno", "echo dos"),
        client.ends("All done."),
    ]
    return play(client.preset, replies, **settings)


def malformed(client: Client) -> Played:
    """A call that does not parse, one of a tool that is not there, a right one, and the end."""
    broken = f'<tool_call>\n{{"name": "{client.shell}", "arguments": {{"comm\n</tool_call>'
    replies: list[Reply] = [
        (*RENDERER.tokenizer.encode(broken), *RENDERER.stop_ids[:1]),
        says("", ("wish", {"for": "more"})),
        client.runs("echo 42 > answer.txt"),
        *[client.ends("I give up.")] * 2,
    ]
    return play(client.preset, replies)


def broken_stream(client: Client, size: int) -> tuple[Played, Cuts]:
    """A long reply whose connection is closed behind so many bytes, the end, and what cut it."""
    cuts = Cuts([size])
    replies = [client.runs("echo 42 > answer.txt", content=LONG), *[client.ends("All done.")] * 2]
    return play(client.preset, replies, cuts=cuts), cuts


def compacted(client: Client, *, at_once: int = 1, characters: int = 0, by_expert: bool = False) -> Played:
    """Play a conversation that outgrows its context: long answers of tools until the client has asked for a summary.

    Args:
        client: that compacts.
        at_once: answers in a turn.
        characters: of each answer; 0: the client's own number.
        by_expert: as in `play`.
    """
    full, number, summed_up = client.compaction, 0, False
    assert full is not None

    def script(prompt: str) -> Message:
        nonlocal number, summed_up
        if full.asks in prompt and SUMMARY not in prompt:
            summed_up = True
            return says(f"<{full.tag}>{SUMMARY}</{full.tag}>")
        if "ANSWERED" in prompt:
            return client.ends("All done.")
        if summed_up:
            return client.runs("echo 42 > answer.txt; echo ANSWERED")
        number += at_once
        counts = range(number, number + at_once)
        return client.runs(*[f"seq {n}00000 {n}99999 | head -c {characters or full.characters}" for n in counts])

    return play(client.preset, script, max_context=full.context, by_expert=by_expert)


def variant(preset: str, folder: Path, *changes: tuple[str, str]) -> str:
    """Write a preset with other texts in it; return its path."""
    text = (FOLDER / f"{preset}.toml").read_text()
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    path = folder / f"{preset}.toml"
    path.write_text(text)
    return str(path)
