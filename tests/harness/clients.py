"""The clients of the matrix: each preset with its shell tool, and the scripted conversations that are played with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents import says

from sparring.types import Message


@dataclass(frozen=True)
class Client:
    """A preset, the name and argument of its shell tool, its package, whether it writes its own history anew, and the
    call by which it ends (name, argument, value; None: it ends with a reply that calls nothing)."""

    preset: str
    shell: str
    argument: str = "command"
    package: str = ""
    edits: bool = False
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
    Client("claude-code", "Bash", package="@anthropic-ai/claude-code"),
    Client("pi", "bash", package="@mariozechner/pi-coding-agent"),
    Client("codex", "exec_command", "cmd", package="@openai/codex"),
    Client("gemini-cli", "run_shell_command", package="@google/gemini-cli"),
    Client("qwen-code", "run_shell_command", package="@qwen-code/qwen-code"),
    Client("opencode", "bash", package="opencode-ai"),
    Client("mini-swe-agent", "bash", package="mini-swe-agent", last=("bash", "command", SUBMIT)),
    Client("openai-agents", "bash", package="openai-agents"),
    Client("openai-agents-responses", "bash", package="openai-agents"),
    Client("langgraph", "bash", package="langgraph"),
    Client("langgraph-anthropic", "bash", package="langgraph"),
    Client("pydantic-ai", "bash", package="pydantic-ai-slim"),
    Client("smolagents", "bash", package="smolagents", edits=True, last=("final_answer", "answer", "Done.")),
)
