"""What is held out, what of a rendered conversation is the reply, and where in it a step ends."""

from __future__ import annotations

import pytest
from conversations import TOOL, answer, call, say, user
from refusals import refused_at

from sparring.errors import BadInput
from sparring.render.load import load_renderer
from sparring.render.steps import StepSplitter, step_ends
from sparring.render.train_tokenizer import train_tokenizer
from sparring.stages.data.preferences import render_reply, render_sides, split_held_out
from sparring.stages.reward_model import turn_labels
from sparring.tasks.preferences import JudgedTurns, Preference


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["one two three", "step by step 1 + 2 = 3\n"], 400, folder)
    return load_renderer(folder)


def preference(number, prompt):
    return Preference(where=f"row {number}", prompt=(user(prompt),), chosen=(say("a"),), rejected=(say("b"),))


def test_a_prompt_is_on_one_side_whatever_its_order():
    rows = [preference(number, f"prompt {number // 3}") for number in range(30)]
    trained, held = split_held_out(rows, 7, seed=1, section="preference")
    assert len(held) == 9 and len(trained) == 21
    assert not {row.prompt for row in trained} & {row.prompt for row in held}
    again = split_held_out(rows[::-1], 7, seed=1, section="preference")
    assert {row.where for row in again[1]} == {row.where for row in held}
    assert {row.where for row in split_held_out(rows, 7, seed=2, section="preference")[1]} != {
        row.where for row in held
    }
    assert split_held_out(rows, 0, seed=1, section="preference") == (rows, [])
    with refused_at("preference.held_out", "prompts left"):
        split_held_out(rows, 28, seed=1, section="preference")


def test_earlier_replies_of_the_prompt_are_not_the_reply(renderer):
    """Not what the assistant said in the prompt, and not what a tool answered."""
    prompt = (user("one"), say("two"), user("three"))
    reply = (call("1 + 2"), answer("3"), say("it is 3"))
    tokens, ours = render_reply(renderer, (TOOL,), "row 1", prompt, reply, 1000)
    said = renderer.decode([token for token, mark in zip(tokens, ours, strict=True) if mark])
    assert "1 + 2" in said and "it is 3" in said and "two" not in said and "tool_response" not in said
    whole = renderer.decode(tokens)
    assert "two" in whole and whole.index("two") < whole.index("it is 3")
    with refused_at("row 1", f"at most 20 tokens, the positions of the model, got {len(tokens)}"):
        render_reply(renderer, (TOOL,), "row 1", prompt, reply, 20)


def test_replies_that_become_equal_ids_are_refused_by_row(renderer):
    """The format writes no blanks at the ends of a reply."""
    row = Preference(where="rows.jsonl:7", prompt=(user("one"),), chosen=(say("a"),), rejected=(say("a \n"),))
    with refused_at("rows.jsonl:7", "two replies of different tokens, got the same ids twice"):
        list(render_sides(renderer, (), row, 1000))
    names = [(id, label) for id, label, *_ in render_sides(renderer, (), preference(1, "one"), 1000)]
    assert names == [("row 1 chosen", 1.0), ("row 1 rejected", -1.0)]


def test_sampled_replies_are_split_into_steps_like_rows(renderer):
    steps = ["1 + 2 = 3", "step by step", "ü 数 🙂"]
    texts = ["\n".join(steps[: count + 1]) for count in range(3)]
    tokens, ours = render_reply(renderer, (), "row", (user("one"),), (say(texts[-1]),), 1000)
    start = ours.index(True)
    divided = StepSplitter(renderer, "\n")
    assert [start + end for end in divided(tokens[start:])] == step_ends(renderer, tokens, start, texts)
    assert divided(tokens[start:])[-1] < len(tokens) - start, "what ends the turn belongs to no step"
    sampled = renderer.render((user("\n\none two \n \nthree\n"),), (), generation=False).tokens
    said = [renderer.decode(sampled[:end]) for end in divided(sampled)]
    assert len(said) == 4 and said[1].rstrip().endswith("one two") and said[2].rstrip().endswith("three"), (
        "blank steps are none"
    )
    assert divided(()) == divided(renderer.stop_ids[:1]) == []


def test_a_turn_ends_behind_its_last_token(renderer):
    """Where the engine stopped sampling, and a reward model of turns is asked."""
    prompt, reply = (user("one"),), (call("1 + 2"), answer("3"), say("it is 3"), user("sure?"), say("yes"))
    tokens, ours = render_reply(renderer, (TOOL,), "row 1", prompt, reply, 1000)
    row = JudgedTurns(where="row 1", prompt=prompt, reply=reply, labels=(1.0, None, 0.25))
    labels = turn_labels(ours, row)
    assert list(labels.values()) == [1.0, 0.25] and max(labels) == len(tokens)
    assert all(tokens[end - 1] in renderer.stop_ids and ours[end - 1] for end in labels)
    assert "1 + 2" in renderer.decode(tokens[: min(labels)]) and "tool_response" not in renderer.decode(
        tokens[: min(labels)]
    )
    with pytest.raises(BadInput, match="row 1, messages: expected 3"):
        turn_labels([True, False, True], row)


def test_a_step_ends_where_its_text_has_been_read(renderer):
    steps = ["1 + 2 = 3", "step by step", "ü 数 🙂"]
    texts = ["\n".join(steps[: count + 1]) for count in range(3)]
    tokens, ours = render_reply(renderer, (), "row", (user("one"),), (say(texts[-1]),), 1000)
    start = ours.index(True)
    ends = step_ends(renderer, tokens, start, texts)
    for end, text in zip(ends, texts, strict=True):
        assert renderer.decode(tokens[start:end]).startswith(text)
        assert not renderer.decode(tokens[start : end - 1]).startswith(text)
    with pytest.raises(BadInput, match="steps: expected"):
        step_ends(renderer, tokens, start, ["another text"])
