"""Loading, rendering, bridging and parsing, for the library's renderer and for a template by difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conversations import CONVERSATIONS, ODD, TOOL, answer, call, say, user
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused_at
from tokenizers import AddedToken, Tokenizer

from sparring.errors import BadInput
from sparring.render.demonstrate import demonstration_tokens, reply_tokens
from sparring.render.load import load_renderer
from sparring.render.round_trip import check_round_trip
from sparring.render.train_tokenizer import train_tokenizer
from sparring.testing.toy import toy_renderer
from sparring.types import Message, ToolCall

BOTH = ("auto", "template")


def with_template(folder: Path, template: str | None, eos: str = "<|im_end|>") -> Path:
    """A checkpoint folder whose chat template is this one."""
    train_tokenizer([ODD], 300, folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {**config, "eos_token": eos, "chat_template": template}
    if template is None:
        del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # alternation is enforced, the beginning is marked, the assistant's end differs from the user's
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[Q]{{ m.content }}[A]{% else %} {{ m.content }}<|file_sep|>{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DEAF = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_the_trained_tokenizer_is_proven(name, thinking, tools):
    facts = check_round_trip(toy_renderer(name=name, thinking=thinking), tools)
    assert len(facts) >= 3 and all(facts)


@pytest.mark.parametrize("template, tools", [(HERMES, ()), (HERMES, (TOOL,)), (STRICT, ()), (DEAF, ())])
def test_unknown_templates_are_served_by_difference(tmp_path, template, tools):
    renderer = load_renderer(with_template(tmp_path, template))
    assert renderer.name == "template"
    assert "a bridge closes a reply that was cut short" in check_round_trip(renderer, tools)


HEADERS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
DEEPSEEK = tuple(f"<｜{n}｜>" for n in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "latest_reminder"))
DEEPSEEK_TASKS = tuple(f"<｜{n}｜>" for n in ("action", "query", "authority", "domain", "title", "read_url"))


@pytest.mark.parametrize(
    "name, tokens", [("llama-3", HEADERS), ("qwen3.5", ()), ("deepseek-v4", (*DEEPSEEK, *DEEPSEEK_TASKS, "｜DSML｜"))]
)
@pytest.mark.parametrize("thinking", [False, True])
def test_named_renderers_of_the_library_are_proven(tmp_path, name, tokens, thinking):
    backend = Tokenizer.from_file(str(train_tokenizer([ODD], 300, tmp_path) / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    backend.save(str(tmp_path / "tokenizer.json"))
    renderer = load_renderer(tmp_path, name, thinking)
    assert renderer.name == name and check_round_trip(renderer, (TOOL,))


def test_a_template_that_ignores_tools_is_refused(tmp_path):
    renderer = load_renderer(with_template(tmp_path, DEAF))
    with refused_at("tools", "a chat template"):
        check_round_trip(renderer, (TOOL,))
    with pytest.raises(BadInput, match=r"no place for python; .*models\.policy\.template"):
        renderer.render([user("Hi")], (TOOL,))


def test_refusals(tmp_path):
    with pytest.raises(BadInput, match="tokenizer.json: expected .*no such folder"):
        load_renderer(tmp_path / "nowhere")
    folder = with_template(tmp_path / "1", None)
    with pytest.raises(BadInput, match="expected a chat template"):
        load_renderer(folder)
    with pytest.raises(BadInput, match="renderer: expected auto"):
        load_renderer(folder, "qwen33")
    with pytest.raises(BadInput, match="expected a chat template that ends an assistant message with a special token"):
        load_renderer(with_template(tmp_path / "2", NO_END))
    with pytest.raises(BadInput, match="chat_template"):
        load_renderer(with_template(tmp_path / "3", "{% for m in %}"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="tokenizer.json"):
        load_renderer(folder)


def test_a_known_family_needs_no_template_but_a_changed_template_wins(tmp_path):
    folder = with_template(tmp_path / "1", None)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_renderer(folder).name == "qwen3"
    changed = with_template(tmp_path / "2", HERMES)
    (changed / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_renderer(changed).name == "template"
    assert load_renderer(changed, "qwen3").name == "qwen3"


def test_a_checkpoints_own_end_id_is_followed_by_the_templates_end(tmp_path):
    folder = with_template(tmp_path, HERMES)
    end = load_renderer(folder).tokenizer.added_tokens["<|endoftext|>"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    renderer = load_renderer(folder)
    assert renderer.stop_ids[1:] == (end,)
    prompt = renderer.render([user("Hi")], ()).tokens
    said = (*renderer.tokenizer.encode("fine"), end)
    bridged = renderer.bridge(prompt, said, [user("Sure?")], ())
    rest = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(bridged[len(prompt) :]) == f"fine<|endoftext|>{rest}"


@pytest.mark.parametrize("thinking", [False, True])
def test_library_and_difference_render_the_same_text(thinking):
    ours, theirs = (toy_renderer(name=name, thinking=thinking) for name in BOTH)
    for conversation in CONVERSATIONS:
        for generation in (False, True):
            a, b = (r.render(conversation, (TOOL,), generation=generation) for r in (ours, theirs))
            assert ours.decode(a.tokens) == ours.decode(b.tokens)
            assert a.tokens == b.tokens


@pytest.mark.parametrize("name", BOTH)
def test_sampled_marks_the_replies_and_never_the_prefilled_thought(name):
    renderer = toy_renderer(name=name)
    rendered = renderer.render([user("Hi"), call("1"), answer("1"), say("It is 1.")], (TOOL,), generation=False)
    said = [token for token, sampled in zip(rendered.tokens, rendered.sampled, strict=True) if sampled]
    assert renderer.decode(said) == (
        '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call><|im_end|>It is 1.<|im_end|>'
    )


@pytest.mark.parametrize("name", BOTH)
def test_a_bridge_keeps_ids_that_no_encoder_would_write(name):
    """The drift: a model may spell a word with other ids than the encoder; rendering its text again changes them."""
    renderer = toy_renderer(name=name)
    word = renderer.tokenizer.encode("answer")
    letters = [id for letter in "answer" for id in renderer.tokenizer.encode(letter)]
    assert len(word) < len(letters)
    prompt = renderer.render([user("Hi")], (TOOL,)).tokens
    completion = (*letters, renderer.stop_ids[0])
    reply = renderer.parse(completion, (TOOL,), prompt=prompt)
    assert reply == say("answer")
    again = renderer.render([user("Hi"), reply, user("Sure?")], (TOOL,)).tokens
    assert again[: len(prompt)] == prompt and again[len(prompt) : len(prompt) + len(letters)] != tuple(letters)
    bridged = renderer.bridge(prompt, completion, [user("Sure?")], (TOOL,))
    assert bridged[: len(prompt) + len(completion)] == (*prompt, *completion)
    assert renderer.decode(bridged) == renderer.decode(again)


@pytest.mark.parametrize("name", BOTH)
@given(data=st.data())
def test_every_sequence_of_ids_parses(name, data):
    renderer = toy_renderer(name=name)
    size = renderer.tokenizer.vocab_size
    markers = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "<|im_end|>"]
    likely = [renderer.tokenizer.convert_tokens_to_ids(text) for text in markers]
    likely += renderer.tokenizer.encode('{"name": "python", "arguments": [1]}\\ud800')
    ids = data.draw(st.lists(st.one_of(st.sampled_from(likely), st.integers(0, size + 50)), max_size=60))
    reply = renderer.parse(ids, (TOOL,), prompt=renderer.render([user("Hi")], (TOOL,)).tokens)
    assert reply.role == "assistant"
    for parsed in reply.tool_calls:
        assert parsed.arguments is None or (parsed.name and isinstance(parsed.arguments, dict))
    again = [user("Hi"), reply, user("Go on")]
    assert renderer.decode(renderer.render(again, (TOOL,)).tokens)  # what parsed can be rendered


MALFORMED = (
    "{not json",
    '{"arguments": {}}',
    '{"name": "python", "arguments": [1]}',
    '{"name": 7, "arguments": {}}',
    '{"name": "python", "arguments": {"code": "\\ud800"}}',
    "[" * 100_000,
    "9" * 5000,
    "[]",
)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_calls_keep_their_raw_text(name, body):
    renderer = toy_renderer(name=name)
    reply = renderer.parse(renderer.tokenizer.encode(f"<tool_call>\n{body}\n</tool_call><|im_end|>"), (TOOL,))
    (parsed,) = reply.tool_calls
    assert parsed.arguments is None and parsed.raw == body


@pytest.mark.parametrize("name", [*BOTH, "qwen3.5"])
@pytest.mark.parametrize(
    ("written", "named"),
    [
        ('{"name": "python", "arguments": {"co', "python"),
        ('{ "name" :"python"', "python"),
        ("<function=python>\n<parameter=code>\n1", "python"),
        ('{"name": "py', ""),
        ('{"arguments": {"name": "python"', ""),
        ('say {"name": "python"', ""),
    ],
)
def test_a_call_that_does_not_parse_has_the_name_that_it_begins_with(name, written, named):
    renderer = toy_renderer(name=name)
    (parsed,) = renderer.parse(renderer.tokenizer.encode(f"<tool_call>\n{written}"), (TOOL,)).tool_calls
    assert (parsed.name, parsed.arguments, parsed.raw.strip()) == (named, None, written)


@pytest.mark.parametrize("name", BOTH)
def test_an_unclosed_call_is_malformed_and_text_around_calls_is_kept(name):
    renderer = toy_renderer(name=name)
    good = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
    reply = renderer.parse(renderer.tokenizer.encode(f'So:\n{good}\n<tool_call>\n{{"name"'), (TOOL,))
    assert reply.content == "So:"
    first, second = reply.tool_calls
    assert first == ToolCall(id="call_0", name="python", arguments={"code": "1"})
    assert second.arguments is None and second.raw == '{"name"'


@pytest.mark.parametrize("name", BOTH)
def test_thoughts_are_parsed_apart(name):
    renderer = toy_renderer(name=name, thinking=True)
    reply = say("Yes.", reasoning="Is it?\nIt is.")
    assert renderer.parse(reply_tokens(renderer, reply), ()) == reply


def test_a_demonstration_that_does_not_continue_its_prompt_is_refused():
    renderer = toy_renderer()
    with pytest.raises(BadInput, match="leave out the reasoning"):
        demonstration_tokens(renderer, [user("Hi"), say("Yes.", reasoning="Hm.")])
    for messages in ([user("Hi")], [say("Yes.")], []):
        with pytest.raises(BadInput, match="demonstration: expected a question and a reply"):
            demonstration_tokens(renderer, messages)
    thinking = toy_renderer(thinking=True)
    with pytest.raises(BadInput, match="split the conversation"):
        demonstration_tokens(thinking, [user("Hi"), say("A"), user("B"), say("C")])


def test_a_lone_surrogate_in_a_message_does_not_stop_a_run():
    renderer = toy_renderer()
    assert "a?b" in renderer.decode(renderer.render([Message(role="user", content="a\ud800b")], ()).tokens)


def test_the_render_cache_tells_apart_values_that_compare_equal():
    renderer = toy_renderer()

    def ids(x: object) -> tuple[int, ...]:
        asked = Message(role="assistant", content="", tool_calls=(ToolCall(id="call_0", name="f", arguments={"x": x}),))
        return renderer.render([user("Hi"), asked, answer("1")], (TOOL,)).tokens

    values = [1, True, 1.0, 0.0, -0.0, "1", 2**70, "\ud800", [1], None]
    first = [ids(value) for value in values]
    assert len(set(first)) == len(values)
    assert [ids(value) for value in values] == first


def test_ends_that_the_checkpoint_names_count_for_every_renderer(tmp_path):
    folder = with_template(tmp_path, None)
    added = load_renderer(folder, "qwen3").tokenizer.added_tokens
    end, other, word = added["<|im_end|>"], added["<|file_sep|>"], 5
    for files in (
        {"generation_config": {"eos_token_id": [end, other]}},
        {"config": {"eos_token_id": [end, other, word]}},
        {"config": {"text_config": {"eos_token_id": other}}},
    ):
        for name in ("generation_config", "config"):
            (folder / f"{name}.json").write_text(json.dumps({"model_type": "qwen3", **files.get(name, {})}))
        for renderer in (load_renderer(folder), load_renderer(folder, "qwen3.5"), load_renderer(folder, "qwen3")):
            assert renderer.stop_ids == (end, *(id for id in renderer.stop_ids[1:] if id != other), other)
            said = [*renderer.tokenizer.encode("fine"), other, *renderer.tokenizer.encode("not read")]
            assert renderer.parse(said, (TOOL,)).content == renderer.parse(said, ()).content == "fine"
