"""What the terminal shows of a conversation."""

import subprocess
import sys

from sparring.cli.chat import shown
from sparring.types import Message, ToolCall

SCRIPT = """
import asyncio
from sparring.cli.chat import _converse
from sparring.errors import EngineError
from sparring.types import Message, ToolCall

class Echo:
    cut_short, notes = "", ("beware",)
    proposals = ("2 + 2 = ?", "count " * 40)

    async def begin(self, number=0):
        task = [Message(role="system", content="of the task"), Message(role="user", content=self.proposals[number - 1])]
        return task if number else []

    async def reply(self, messages):
        last = messages[-1].content
        if last == "break":
            raise EngineError("engine: gone")
        call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="python", arguments={"code": "print(1)"}),))
        return Message(role="assistant", content=f"{len(messages)} {last}"), [call, Message(role="tool", content="1")]
    async def close(self):
        pass

with asyncio.Runner() as runner:
    _converse(runner, Echo(), [Message(role="system", content="s")])
"""


def _talk(*lines: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], input="\n".join(lines), capture_output=True, text=True, timeout=60
    )


def test_a_conversation_grows_and_new_forgets_it() -> None:
    done = _talk("hello", "again", "/new", "fresh", "/quit", "never")
    answers = [line for line in done.stdout.splitlines() if "it> " in line]
    assert [line.partition("it> ")[2] for line in answers] == ["2 hello", "6 again", "2 fresh"]
    assert "  > python:\n  > print(1)\n  | 1\nit> 2 hello" in done.stdout


def test_a_failed_answer_is_forgotten_and_the_talk_goes_on() -> None:
    done = _talk("break", "hello")
    assert done.returncode == 0
    assert "(engine: gone)" in done.stderr
    assert "it> 2 hello" in done.stdout


def test_calls_reasoning_and_results_are_marked() -> None:
    calls = (
        ToolCall(id="1", name="python", arguments={"code": "a = 1\nprint(a)"}),
        ToolCall(id="2", name="look", arguments={"at": "x", "n": 2}),
        ToolCall(id="3", name="bad", arguments=None, raw="{oops"),
    )
    text = shown(Message(role="assistant", content="", reasoning="let me see", tool_calls=calls))
    assert text.splitlines() == [
        "  ~ let me see",
        "  > python:",
        "  > a = 1",
        "  > print(a)",
        "  > look(at='x', n=2)",
        "  > bad: {oops",
    ]
    assert shown(Message(role="tool", content="1\n2")) == "  | 1\n  | 2"
    assert shown(Message(role="tool", content="")) == "  | (nothing)"
    assert shown(Message(role="assistant", content="")) == "it> "


def test_a_model_cannot_steer_the_terminal() -> None:
    assert shown(Message(role="assistant", content="a\x1b[2Jb\r\tc\n")) == "it> a\\x1b[2Jb\\r\tc"


def test_proposed_tasks_are_shown_and_asked_by_number() -> None:
    """A proposal begins a conversation of its own, in which the user's system message is the only one."""
    done = _talk("hello", "/1", "and now", "/3", "/quit")
    head, _, rest = done.stdout.partition("\nyou> ")
    assert head.splitlines()[1:3] == ["(beware)", "Tasks that it never saw in training; their numbers ask them:"]
    assert head.splitlines()[3] == "  /1  2 + 2 = ?" and head.splitlines()[4].endswith("coun ...")
    assert "task> 2 + 2 = ?" in rest and "of the task" not in rest
    answers = [line.partition("it> ")[2] for line in rest.splitlines() if "it> " in line]
    assert answers == ["2 hello", "2 2 + 2 = ?", "6 and now", "10 /3"]
