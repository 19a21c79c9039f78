"""The exported chat template writes a run's prompts when the transformers library reads it and is told nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conversations import ODD, TOOL

from sparring.recipe.load import from_data
from sparring.render.chat_template import ChatTemplate, read_chat_template
from sparring.render.dialect import message_dicts, tool_dicts
from sparring.render.exported_template import FORMS, compare, ends_of, own_source, settled, template_in, tried_prompts
from sparring.render.load import load_renderer
from sparring.render.tokenizer import load_tokenizer
from sparring.render.train_tokenizer import train_tokenizer
from sparring.stages.models.exported_format import write_format
from sparring.store.sqlite import SqliteStore

DROPS_EMPTY = (  # as Qwen3 does: thinks unless told not to, and shows no empty thought of an earlier reply
    "{% set ns = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.at and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    return train_tokenizer([ODD], 420, tmp_path_factory.mktemp("tokenizer"))


def with_template(folder: Path, out: Path, template: str | None) -> Path:
    shutil.copytree(folder, out)
    if template is not None:
        (out / "chat_template.jinja").write_text(template)
    return out


def written(folder: Path, out: Path, renderer: str, thinking: bool, thoughts: str) -> list[str]:
    policy = {"path": str(folder), "thinking": thinking, "renderer": renderer}
    recipe = {
        "run": {"name": "x"},
        "models": {"policy": policy},
        "env": {"name": "none"},
        "render": {"thoughts": thoughts},
    }
    config = from_data({**recipe, "rollout": {"sampling": {"top_k": 20, "temperature": 0.7}}}, "the test")
    shutil.copytree(folder, out)
    store = SqliteStore(out / "store.sqlite")
    try:
        return write_format(out, folder, config, store)
    finally:
        store.close()


@pytest.mark.parametrize("template", [None, DROPS_EMPTY], ids=["ours", "drops empty thoughts"])
@pytest.mark.parametrize("thoughts", ["kept", "template"])
@pytest.mark.parametrize("thinking", [False, True])
def test_the_library_writes_the_prompts_of_a_session(folder, tmp_path, template, thoughts, thinking):
    from transformers import AutoTokenizer

    source = with_template(folder, tmp_path / "source", template)
    for name in ("auto", "template"):
        out = tmp_path / name
        assert written(source, out, name, thinking, thoughts) == [
            "the chat template has the run's settings; no recorded prompt was there to hold it against"
        ]
        theirs = AutoTokenizer.from_pretrained(out)
        renderer = load_renderer(source, name, thinking, thoughts=thoughts)
        prompts = [
            *tried_prompts(renderer, (TOOL,), thinking=thinking),
            *tried_prompts(renderer, (), thinking=thinking),
        ]
        assert len(prompts) == 12
        for prompt in prompts:
            messages, tools = message_dicts(prompt.messages), tool_dicts(prompt.tools) or None
            ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
            assert tuple(ids) == tuple(prompt.tokens), theirs.decode(ids)
        config = json.loads((out / "tokenizer_config.json").read_text())
        assert config["chat_template"] == (out / "chat_template.jinja").read_text()


def test_generation_begins_and_ends_as_in_the_run(folder, tmp_path):
    from transformers import GenerationConfig

    source = with_template(folder, tmp_path / "source", None)
    before = {"eos_token_id": 1, "bos_token_id": 5, "repetition_penalty": 1.05, "top_p": 0.8}
    (source / "generation_config.json").write_text(json.dumps(before))
    written(source, tmp_path / "out", "auto", False, "kept")
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == list(load_renderer(source).stop_ids) and settings.bos_token_id == 5
    assert (settings.do_sample, settings.temperature, settings.top_p, settings.top_k) == (True, 0.7, 1.0, 20)
    assert not settings.repetition_penalty or settings.repetition_penalty == 1.0


def test_exporting_an_exported_template_changes_nothing(folder):
    source = read_chat_template(folder, {}).source
    for form in FORMS:
        text = template_in(form, source, thinking=True, ends=["<|im_end|>"])
        assert own_source(text).rstrip("\n") == source.rstrip("\n")


def test_two_templates_by_tools_are_one(folder, tmp_path):
    source = with_template(folder, tmp_path / "source", None)
    (source / "chat_template.jinja").unlink()
    settings = json.loads((source / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "no tools\n"}, {"name": "tool_use", "template": "tools\n"}]
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    whole = ChatTemplate(read_chat_template(source, {}).whole_source, {}, where="whole")
    texts = [whole.text([], tools, generation=True, thinking=None) for tools in ((), tool_dicts((TOOL,)))]
    assert texts == ["no tools\n", "tools\n"]


def test_a_template_that_cannot_write_the_prompts_is_reported(folder):
    """A run whose prompts are those of another format: every one of them is counted, and the first is shown."""
    renderer, tokenizer = load_renderer(folder), load_tokenizer(folder)
    prompts = list(tried_prompts(renderer, (), thinking=False))
    other = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    _, comparison = settled(other, {}, prompts, renderer, tokenizer.encode, thinking=False, tools=())
    assert (comparison.same, len(comparison.other)) == (0, len(prompts))
    assert comparison.shown[0].startswith("<|im_start|>") and comparison.shown[1].startswith("user: Who?")


def test_differing_prompts_are_counted_by_cause(folder):
    """Sampled ids that no tokenizer makes of their text; a reply that was sampled with other blanks; another format."""
    renderer, tokenizer = load_renderer(folder), load_tokenizer(folder)
    template = read_chat_template(folder, tokenizer.special)
    prompt = next(each for each in tried_prompts(renderer, (), thinking=False) if len(each.messages) == 3)
    changed = {}
    for name, (old, new) in {"spelt": ("Who", "Who"), "blanks": ("Me.", "Me. "), "other": ("user", "human")}.items():
        text = renderer.decode(prompt.tokens).replace(old, new)
        changed[name] = [id for piece in (text if name == "spelt" else [text]) for id in tokenizer.encode(piece)]
    cases = [type(prompt)(name=n, messages=prompt.messages, tools=(), tokens=t) for n, t in changed.items()]
    found = compare(template, [prompt, *cases], tokenizer.encode, renderer)
    assert (found.same, found.spelt, found.replies, found.other) == (1, 1, 2, ())
    assert ends_of(renderer)[0] == "<|im_end|>"
