"""Where a checkpoint folder has its chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparring.errors import BadInput
from sparring.render.chat_template import NAMED, read_chat_template

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
