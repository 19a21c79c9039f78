"""What every `Renderer` promises, for each implementation and mode."""

from __future__ import annotations

import pytest
from conversations import CONVERSATIONS, ODD, TOOL, answer, call, say, user

from sparring.protocols import Renderer
from sparring.render.demonstrate import reply_tokens
from sparring.testing.toy import toy_renderer

RENDERERS = [
    pytest.param(toy_renderer(name=name, thinking=thinking), id=f"{name}-{'thinking' if thinking else 'direct'}")
    for name in ("qwen3", "template")
    for thinking in (False, True)
]
TOOLS = (TOOL,)


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_rendering_is_a_function_with_one_mark_per_token(renderer: Renderer, conversation):
    for generation in (False, True):
        rendered = renderer.render(conversation, TOOLS, generation=generation)
        assert rendered == renderer.render(conversation, TOOLS, generation=generation)
        assert len(rendered.tokens) == len(rendered.sampled) and not rendered.sampled[0]
        text = renderer.decode(rendered.tokens)
        assert all(m.content in text for m in conversation if m.role != "assistant")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_generation_prompt_only_adds(renderer: Renderer):
    without = renderer.render([user(ODD)], TOOLS, generation=False).tokens
    prompt = renderer.render([user(ODD)], TOOLS).tokens
    assert prompt[: len(without)] == without and len(prompt) > len(without)


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize(
    "reply", [say("Yes."), say(ODD.replace("<tool_call>", "")), call(ODD.replace("<tool_call>", ""))]
)
def test_replies_round_trip(renderer: Renderer, reply):
    prompt = renderer.render([user("Hi")], TOOLS).tokens
    tokens = reply_tokens(renderer, reply, TOOLS)
    assert tokens[-1] in renderer.stop_ids and not set(tokens[:-1]) & set(renderer.stop_ids)
    parsed = renderer.parse(tokens, TOOLS, prompt=prompt)
    assert parsed.content == reply.content
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [(c.name, c.arguments) for c in reply.tool_calls]


@pytest.mark.parametrize("renderer", RENDERERS)
def test_bridges_extend_to_the_id_at_every_cut(renderer: Renderer):
    prompt = renderer.render([user("Hi")], TOOLS).tokens
    whole = reply_tokens(renderer, call("print(1)", content="So:"), TOOLS)
    new = [answer("1"), answer(ODD)]
    complete = renderer.bridge(prompt, whole, new, TOOLS)
    assert complete is not None
    bridges = {cut: renderer.bridge(prompt, whole[:cut], new, TOOLS) for cut in range(1, len(whole) + 1)}
    assert [cut for cut, bridged in bridges.items() if bridged is None] == []
    for cut, bridged in bridges.items():
        assert bridged[: len(prompt) + cut] == (*prompt, *whole[:cut])
        assert bridged[-20:] == complete[-20:]


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_bridge_is_what_the_next_bridge_continues(renderer: Renderer):
    tokens = renderer.render([user("Hi")], TOOLS).tokens
    for turn in range(3):
        said = reply_tokens(renderer, call(f"print({turn})"), TOOLS)
        bridged = renderer.bridge(tokens, said, [answer(str(turn))], TOOLS)
        assert bridged is not None and bridged[: len(tokens) + len(said)] == (*tokens, *said)
        tokens = bridged
    assert renderer.decode(tokens).count("<tool_response>") == 3


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_bridge_refuses_replies_and_nothing(renderer: Renderer):
    prompt = renderer.render([user("Hi")], TOOLS).tokens
    said = reply_tokens(renderer, call("1"), TOOLS)
    assert renderer.bridge(prompt, said, [answer("1")], TOOLS) is not None
    assert renderer.bridge(prompt, said, [answer("1"), say("No."), user("So?")], TOOLS) is None
    assert renderer.bridge(prompt, said, [], TOOLS) is None
    assert renderer.bridge(prompt, (), [answer("1")], TOOLS) is None


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_reply_that_ended_on_a_foreign_stop_id_gets_the_end_of_the_format(renderer: Renderer):
    own, *foreign = renderer.stop_ids
    assert foreign or renderer.name == "template"
    for end in (*foreign, own):
        prompt = renderer.render([user("Hi")], TOOLS).tokens
        said = (*reply_tokens(renderer, call("1"), TOOLS)[:-1], end)
        bridged = renderer.bridge(prompt, said, [answer("1")], TOOLS)
        rest = renderer.decode(bridged[len(prompt) + len(said) :])
        assert bridged[: len(prompt) + len(said)] == (*prompt, *said)
        assert rest.startswith("\n<|im_start|>user" if end == own else "<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_an_unclosed_thought_is_closed_before_the_bridge(renderer: Renderer):
    prompt = renderer.render([user("Hi")], TOOLS).tokens
    cut = renderer.tokenizer.encode("<think>\nHm")
    own, *foreign = renderer.stop_ids
    for said in (cut, *((*cut, end) for end in foreign)):
        bridged = renderer.bridge(prompt, said, [answer("1")], TOOLS)
        assert bridged[: len(prompt) + len(said)] == (*prompt, *said)
        assert renderer.decode(bridged[len(prompt) + len(said) :]).startswith("</think><|im_end|>\n<|im_start|>user")
    # the turn is over: nothing can close its thought, so the session renders the conversation anew
    assert renderer.bridge(prompt, (*cut, own), [answer("1")], TOOLS) is None
    closed = renderer.tokenizer.encode("<think>\nHm</think>So <think>")
    assert renderer.bridge(prompt, (*closed, own), [answer("1")], TOOLS) is not None


@pytest.mark.parametrize("renderer", RENDERERS)
def test_nothing_sampled_breaks_parsing(renderer: Renderer):
    for completion in ((), renderer.stop_ids[:1], (10**6,), tuple(range(400)), tuple(reversed(range(400)))):
        assert renderer.parse(completion, TOOLS).role == "assistant"
