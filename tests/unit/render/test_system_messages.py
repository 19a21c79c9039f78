"""System messages where a template has a place for them, and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conversations import TOOL
from formats import FORMATS, NO_TOOLS, format_renderer

from sparring.errors import BadInput
from sparring.render.load import load_renderer
from sparring.render.train_tokenizer import train_tokenizer
from sparring.testing.toy import toy_renderer
from sparring.types import Message

A, B, C = (Message(role="system", content=f"Rule {name}.") for name in "ABC")
USER, REPLY, NEXT = (
    Message(role=role, content=text) for role, text in (("user", "Who?"), ("assistant", "Me."), ("user", "Why?"))
)
OF_ONE = ("minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8")
"""Formats that write one system message, at the beginning."""

REMINDED = (*OF_ONE, "deepseek-v4", "hy3")
"""Formats that write none in mid-conversation, move it, or leave the reply's prompt out behind it."""


def renderer_of(name: str) -> Any:
    return toy_renderer(name="template") if name == "template" else format_renderer(name)


def text(renderer: Any, *messages: Message) -> str:
    return renderer.decode(renderer.render(messages, ()).tokens)


@pytest.mark.parametrize("name", ["template", *FORMATS])
def test_every_system_message_is_rendered_where_it_was_sent(name: str) -> None:
    renderer = renderer_of(name)
    leading = text(renderer, A, B, USER)
    assert leading.index(A.content) < leading.index(B.content) < leading.index(USER.content)
    assert (f"{A.content}\n\n{B.content}" in leading) == (name in OF_ONE or name in ("deepseek-r1", "deepseek-v3"))
    for later in ((NEXT, C), (C, NEXT), (C,)):
        said = text(renderer, A, USER, REPLY, *later)
        places = [said.index(message.content) for message in (A, USER, REPLY, *later)]
        assert places == sorted(places) and ("<system-reminder>" in said) == (name in REMINDED)
        assert said.endswith(text(renderer, USER)[-8:])
        completion = renderer.tokenizer.encode("Me.")
        prompt = renderer.render([A, USER], ()).tokens
        bridged = renderer.bridge(prompt, completion, later, ())
        if bridged is not None:
            assert C.content in renderer.decode(bridged[len(prompt) + len(completion) :])


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in NO_TOOLS])
def test_with_tools_system_messages_are_rendered_where_they_were_sent(name: str) -> None:
    """Llama 3 has the tools in the message behind its first one, which must be a user's."""
    renderer = renderer_of(name)
    for messages in ((A, B, USER), (A, USER, REPLY, NEXT, C), (A, B, USER, REPLY, C, NEXT)):
        said = renderer.decode(renderer.render(messages, (TOOL,)).tokens)
        places = [said.index(message.content) for message in messages]
        assert places == sorted(places) and TOOL.name in said


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-3"])
def test_a_reminder_joins_the_preceding_or_else_the_following_user_message(name: str) -> None:
    renderer = renderer_of(name)
    reminder = "<system-reminder>\nRule C.\n</system-reminder>"
    assert f"Why?\n\n{reminder}" in text(renderer, USER, REPLY, NEXT, C)
    assert f"{reminder}\n\nWhy?" in text(renderer, USER, REPLY, C, NEXT)
    assert f"user\n{reminder}" in text(renderer, USER, REPLY, C)
    assert text(renderer, USER, REPLY, NEXT, C) == text(
        renderer, USER, REPLY, Message(role="user", content=f"Why?\n\n{reminder}")
    )


def test_a_conversation_that_a_template_refuses_is_refused_without_its_path(tmp_path: Path) -> None:
    train_tokenizer(["Hi"], 300, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = load_renderer(tmp_path, "template")
    assert "<system-reminder>\nRule C." in text(renderer, USER, C)
    with pytest.raises(BadInput, match="chat template: .*no system") as refusal:
        text(renderer, A, USER)
    assert str(tmp_path) not in str(refusal.value)
