"""`sparring chat CHECKPOINT`: talk to a checkpoint in the terminal, tools included."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.errors import BadInput, SparringError
from sparring.observe.terminal import printable, say
from sparring.types import Message, ToolCall

if TYPE_CHECKING:
    from sparring.launch.chat import Chat

HELP = "An empty line or /quit ends, /new forgets the conversation, Ctrl-C stops an answer."
PROPOSED = "Tasks that it never saw in training; their numbers ask them:"
SHORTENED = 100
"""Maximum width of a proposed task in the list."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "chat", help="talk to a checkpoint in the terminal", description=f"Talk to a checkpoint, tools included. {HELP}"
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a Hugging Face folder, a run, or a saved step of it"
    )
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--no-tools", action="store_true", help="offer no tools")
    parser.add_argument("--temperature", type=_number(float, 0), default=1.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--max-tokens", type=_number(int, 1), default=256, help="sampled tokens in one turn")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and words give the same answers")
    parser.set_defaults(run=run)


def _number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    """Return an argument type for numbers that are at least `least`."""

    def parsed(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return value

    parsed.__name__ = kind.__name__  # argparse's name for it when `text` is not a number
    return parsed


def run(args: argparse.Namespace) -> int:
    """Hold the conversation until the user ends it."""
    from sparring.launch.chat import Chat

    chat = Chat(
        args.checkpoint,
        tools=not args.no_tools,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    opening = [Message(role="system", content=args.system)] if args.system else []
    with asyncio.Runner() as runner:  # one loop for all turns, because the engine's futures belong to it
        try:
            _converse(runner, chat, opening)
        finally:
            runner.run(chat.close())
    return 0


def _converse(runner: asyncio.Runner, chat: Chat, opening: Sequence[Message]) -> None:
    messages = _first_messages(runner, chat, opening, 0)
    say(HELP)
    for note in chat.notes:
        say(f"({note})")
    if chat.proposals:
        say(PROPOSED)
    for number, text in enumerate(chat.proposals, 1):
        say(f"  /{number}  {text if len(text) <= SHORTENED else text[:SHORTENED] + ' ...'}")
    numbers = {f"/{number}": number for number in range(1, len(chat.proposals) + 1)}
    while True:
        try:
            words = input("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            say()
            return
        if words in ("", "/quit"):
            return
        try:
            if words == "/new":
                messages = _first_messages(runner, chat, opening, 0)
                continue
            if words in numbers:
                conversation = _first_messages(runner, chat, opening, numbers[words])
                say("\n".join(message_text(message) for message in conversation if message.role != "system"))
            else:
                conversation = [*messages, Message(role="user", content=words)]
            answer, between = runner.run(chat.reply(conversation))
        except KeyboardInterrupt:
            say("\n(stopped; say something else)")
            continue
        except BadInput:
            raise
        except SparringError as error:
            say(f"({error})", stream=sys.stderr)
            continue
        messages = [*conversation, *between, answer]
        for message in (*between, answer):
            say(message_text(message))
        if chat.cut_short:
            say(f"(cut short: {chat.cut_short})")


def _first_messages(runner: asyncio.Runner, chat: Chat, opening: Sequence[Message], number: int) -> list[Message]:
    """Return the first messages of a new conversation. The user's system message replaces the task's."""
    messages = runner.run(chat.begin(number))
    return [*opening, *(message for message in messages if not opening or message.role != "system")]


def message_text(message: Message) -> str:
    """Return one message as text for the terminal, with reasoning, calls and results marked."""
    if message.role == "tool":
        return "\n".join("  | " + printable(line) for line in message.content.splitlines() or ["(nothing)"])
    if message.role == "user":
        return "task> " + printable(message.content.strip())
    lines = [f"  ~ {printable(line)}" for line in (message.reasoning or "").splitlines() if line.strip()]
    if message.content.strip() or not message.tool_calls:
        lines.append("it> " + printable(message.content.strip()))
    for call in message.tool_calls:
        lines += [f"  > {printable(line)}" for line in _call_text(call).splitlines()]
    return "\n".join(lines)


def _call_text(call: ToolCall) -> str:
    """Return a call as `name(arguments)`, with a single text argument, such as code, on lines of its own."""
    if call.arguments is None:
        return f"{call.name}: {call.raw}"
    values = list(call.arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return f"{call.name}:\n{values[0]}"
    return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"
