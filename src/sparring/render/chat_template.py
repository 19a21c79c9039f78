"""A checkpoint's own chat template, rendered as Hugging Face renders it, without transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from sparring.errors import BadInput, boundary
from sparring.render.tokenizer import read_json

# Templates that print today's date print this one, so that a resumed run does not differ from an uninterrupted one.
_TODAY = datetime.datetime(2025, 1, 1)

NAMED = "additional_chat_templates"
"""Folder of named templates inside a checkpoint's folder."""
_CHOICE = "{{% if tools +%}}{}{{%+ else +%}}{}{{%+ endif %}}"


class ChatTemplate:
    """A compiled chat template.

    Args:
        for_tools: variant for conversations with tools, if the checkpoint has one.
        where: file and key of the template, for error messages.

    Attributes:
        whole_source: one text that holds both variants.
    """

    def __init__(self, source: str, special: Mapping[str, str], *, for_tools: str | None = None, where: str) -> None:
        self.source = source
        self.whole_source = source if for_tools in (None, source) else _CHOICE.format(for_tools, source)
        self.where = where
        self._special = dict(special)
        with boundary(BadInput, where, "a chat template in Jinja", "correct it"):
            self._plain = _compiled(source)
            self._with_tools = _compiled(for_tools or source)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation: bool,
        thinking: bool | None,
    ) -> str:
        """Render a conversation.

        Args:
            thinking: value of `enable_thinking`; None leaves the template's default.

        Raises:
            BadInput: the template refuses this conversation.
        """
        template = self._with_tools if tools else self._plain
        switch = {} if thinking is None else {"enable_thinking": thinking}
        with boundary(
            BadInput, "chat template", "a chat template that takes this conversation", "correct it, or the conversation"
        ):
            return template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation,
                **switch,
                **self._special,
            )


def read_chat_template(path: str | Path, special: Mapping[str, str]) -> ChatTemplate | None:
    """Read the template of a checkpoint folder. As in the transformers library, this is chat_template.jinja and the
    named templates in the folder `NAMED`, or else `chat_template` in tokenizer_config.json. For a conversation with
    tools, the template named `tool_use` replaces the default. Templates of other names are ignored, since transformers
    uses such a template only if a caller gives its name. Return None if the folder has no template.

    Raises:
        BadInput: a template is not text, or not valid Jinja.
    """
    folder = Path(path)
    file, where = folder / "chat_template.jinja", f"{folder / 'tokenizer_config.json'}: chat_template"
    named = {each.stem: _text(each) for each in sorted((folder / NAMED).glob("*.jinja"))}
    if named:
        where = str(folder / NAMED)
    if file.is_file():
        named["default"], where = _text(file), str(file)
    if not named:
        value = read_json(folder / "tokenizer_config.json").get("chat_template")
        named = {"default": value} if isinstance(value, str) else {}
        if isinstance(value, list):
            with boundary(BadInput, where, "templates, each {name, template}", "correct it"):
                named = {str(entry["name"]): str(entry["template"]) for entry in value}
    default = named.get("default", next(iter(named.values()), None))
    return None if default is None else ChatTemplate(default, special, for_tools=named.get("tool_use"), where=where)


def _text(file: Path) -> str:
    with boundary(BadInput, str(file), "a text file in Jinja", "correct it"):
        return file.read_text(encoding="utf-8")


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which marks assistant text for Hugging Face's masks; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


@lru_cache(16)  # a run reads its template for every stage and check, and compiling one takes 50 ms
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    del environment.filters["random"], environment.globals["lipsum"]  # a prompt is a function of its messages
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
