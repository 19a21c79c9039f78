"""Choice of the renderer that serves a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.render.chat_template import ChatTemplate, read_chat_template
from sparring.render.config import Thoughts
from sparring.render.dialect import message_dicts, tool_dicts
from sparring.render.difference import TemplateRenderer
from sparring.render.escaping import TextEscaper
from sparring.render.library import LibraryRenderer
from sparring.render.tokenizer import FileTokenizer, load_tokenizer, read_json
from sparring.types import Message, ToolCall, ToolSpec

# Families that "auto" recognises: the library's name, the model types that use it, the tokens that it requires.
_FAMILIES = (
    (
        "qwen3",
        ("qwen3", "qwen3_moe"),
        ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>"),
    ),
)


_EFFORTS: Mapping[str, tuple[str | float, str | float]] = {"hy3": ("no_think", "high"), "inkling": ("none", 0.9)}
"""Formats whose thinking switch is an effort, with the value of the effort without and with thoughts."""


def load_renderer(
    path: str | Path,
    name: str = "auto",
    thinking: bool = False,
    control_tokens: Sequence[str] = (),
    thoughts: Thoughts = "template",
) -> LibraryRenderer | TemplateRenderer:
    """Load the renderer of a local checkpoint folder. Never imports torch or transformers.

    Args:
        path: folder with tokenizer.json and, for an unknown family, a chat template.
        name: `auto`; `template` (the checkpoint's own template, by difference); or a renderer of the `renderers`
            library.
        thinking: whether the model thinks before it answers, if the format has a switch for it.
        control_tokens: roles (system, user) whose messages before the first reply may write added tokens. Everywhere
            else, the text of an added token is encoded as plain text.

    Raises:
        BadInput: another role in `control_tokens`, no tokenizer, neither a chat template nor a known family, an unknown
            name, or a template without turn ends.
    """
    tokenizer = load_tokenizer(path)
    escaper = TextEscaper(tokenizer.control, control_tokens)
    template = read_chat_template(path, tokenizer.special)
    if name not in ("auto", "template"):
        return _library_renderer(name, tokenizer, thinking, thoughts, escaper)
    if name == "auto":
        family = _recognise(path, tokenizer, template, thinking, thoughts, escaper)
        if family is not None:
            return family
    if template is None:
        raise refusal(
            str(path),
            "a chat template (chat_template.jinja or tokenizer_config.json) or a known model family",
            "neither",
            "add the template of the model this tokenizer belongs to, or name its renderer",
        )
    ends = _end_ids(Path(path), tokenizer)
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return TemplateRenderer(
        template,
        tokenizer,
        escaper,
        thinking=thinking,
        keeps_thoughts=thoughts == "kept",
        stop_ids=ends,
    )


def _library_renderer(
    name: str, tokenizer: FileTokenizer, thinking: bool, thoughts: Thoughts, escaper: TextEscaper
) -> LibraryRenderer:
    from renderers import config_from_name, create_renderer

    try:
        config = config_from_name(name)
    except ValueError as cause:
        raise refusal(
            "renderer", "auto, template or a renderer of the library", str(cause), "correct the name"
        ) from cause
    if config is not None:
        fields = type(config).model_fields
        settings: dict[str, Any] = {"enable_thinking": thinking} if "enable_thinking" in fields else {}
        if name in _EFFORTS:
            settings["reasoning_effort"] = _EFFORTS[name][thinking]
        if thoughts == "kept" and settings.get("enable_thinking", True) and "thinking_retention" in fields:
            settings["thinking_retention"] = "all"
        config = type(config)(**settings) if settings else config
    with boundary(
        BadInput, f"renderer {name}", f"a tokenizer of its family in {tokenizer.name_or_path}", "name another"
    ):
        library = create_renderer(tokenizer, config)
        ends, keeps = _end_ids(Path(tokenizer.name_or_path), tokenizer), thoughts == "kept"
        return LibraryRenderer(library, tokenizer, name, escaper, keeps_thoughts=keeps, stop_ids=ends)


def _recognise(
    path: str | Path,
    tokenizer: FileTokenizer,
    template: ChatTemplate | None,
    thinking: bool,
    thoughts: Thoughts,
    escaper: TextEscaper,
) -> LibraryRenderer | None:
    """Return the renderer of a known family if the tokenizer has its tokens, and the checkpoint's template (or its
    model type, if it has no template) confirms it."""
    model_type = read_json(Path(path) / "config.json").get("model_type")
    for name, types, tokens in _FAMILIES:
        if not set(tokens) <= set(tokenizer.added_tokens):
            continue
        renderer = _library_renderer(name, tokenizer, thinking, thoughts, escaper)
        if model_type in types if template is None else _agrees(renderer, template, thinking):
            return renderer
    return None


def _agrees(renderer: LibraryRenderer, template: ChatTemplate, thinking: bool) -> bool:
    """Return whether the library renders as the checkpoint's template, which a fine-tune may have changed."""
    tool = ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}})
    call = ToolCall(id="call_0", name="look", arguments={"at": "it"})
    system, user = Message(role="system", content="Be brief."), Message(role="user", content="Who?")
    conversations = (
        ((user,), (), True),
        ((system, user), (tool,), True),
        ((user, Message(role="assistant", content="Me.")), (), False),
        ((user, Message(role="assistant", tool_calls=(call,))), (tool,), False),
    )
    for messages, tools, generation in conversations:
        try:
            text = template.text(message_dicts(messages), tool_dicts(tools), generation=generation, thinking=thinking)
        except BadInput:
            return False
        if text != renderer.decode(renderer.render(messages, tools, generation=generation).tokens):
            return False
    return True


def _end_ids(folder: Path, tokenizer: FileTokenizer) -> list[int]:
    """Return the ids that the checkpoint names as ends of a generation, in generation_config.json and in config.json,
    from which Hugging Face derives a missing generation config. Ids of config.json that are no added tokens are left
    out: a library's default may be any word."""
    config, added = read_json(folder / "config.json"), set(tokenizer.added_tokens.values())
    inner = config.get("text_config")
    named = [*_ids(config), *(_ids(inner) if isinstance(inner, Mapping) else ())]
    return [*_ids(read_json(folder / "generation_config.json")), *(id for id in named if id in added)]


def _ids(config: Mapping[str, Any]) -> list[int]:
    named = config.get("eos_token_id")
    return [id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int)]
