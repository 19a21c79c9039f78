"""Where a checkpoint folder has its chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparring.errors import BadInput
from sparring.render.chat_template import NAMED, ChatTemplate, read_chat_template

TOOL = [{"type": "function", "function": {"name": "look"}}]


def texts(folder: Path) -> list[str]:
    template = read_chat_template(folder, {})
    assert template is not None
    return [template.text([], tools, generation=False, thinking=None) for tools in ([], TOOL)]


def test_templates_of_a_folder_of_their_own_are_read_by_name(tmp_path: Path) -> None:
    """As the transformers library saves several: the default apart from the others."""
    (tmp_path / NAMED).mkdir()
    for name, text in {"tool_use": "with {{ tools|length }}", "rag": "with documents"}.items():
        (tmp_path / NAMED / f"{name}.jinja").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "an older one"}))
    (tmp_path / "chat_template.jinja").write_text("without")
    assert texts(tmp_path) == ["without", "with 1"]
    (tmp_path / NAMED / "tool_use.jinja").unlink()
    assert texts(tmp_path) == ["without", "without"]


@pytest.mark.parametrize("written", [b"{% for", b"\xff\xfe"])
def test_a_named_template_that_cannot_be_read_is_refused_by_its_file(tmp_path: Path, written: bytes) -> None:
    (tmp_path / NAMED).mkdir()
    (tmp_path / NAMED / "tool_use.jinja").write_bytes(written)
    with pytest.raises(BadInput) as refused:
        read_chat_template(tmp_path, {})
    assert NAMED in str(refused.value)


def test_a_list_that_is_none_of_templates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default"}]}))
    with pytest.raises(BadInput):
        read_chat_template(tmp_path, {})


@pytest.mark.parametrize("drawn", ["{{ ['a', 'b']|random }}", "{{ lipsum() }}"])
def test_a_template_that_draws_is_refused(tmp_path: Path, drawn: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(drawn)
    with pytest.raises(BadInput):
        texts(tmp_path)


NAMES = (
    "messages tools documents add_generation_prompt continue_final_message enable_thinking bos_token eos_token "
    "unk_token pad_token image_token raise_exception strftime_now"
).split()


@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "look"}},)])
@pytest.mark.parametrize("generation", [True, False])
def test_a_template_sees_the_names_that_transformers_gives_it(tools, generation):
    from transformers.utils.chat_template_utils import render_jinja_template

    told = "".join(f"{{{{ '{n}' if {n} is defined }}}}{{{{ ' none' if {n} is none }}}} " for n in NAMES)
    text = told + (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% continue %}{% endif %}{{ bos_token + message.content }}{% endfor %}"
        "{{ documents | tojson }}{{ tools | tojson }}{{ add_generation_prompt }}{{ strftime_now('%A') | length > 5 }}"
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é\n"}]
    ours = ChatTemplate(text, special, where="t").text(messages, tools, generation=generation, thinking=None)
    given = {"tools": list(tools) or None, "chat_template": text, "add_generation_prompt": generation}
    [theirs], _ = render_jinja_template([messages], **given, **special)
    assert ours == theirs and "documents none" in ours
