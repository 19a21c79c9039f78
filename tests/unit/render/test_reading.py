"""Replies that are read while they are sampled: pieces are a beginning of what the whole reply is parsed as, and
nothing is ever taken back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sparring.render.demonstrate import reply_tokens
from sparring.render.library import READ_BY_TAGS
from sparring.reply import ShownReply
from sparring.testing.formats import format_renderer
from sparring.testing.toy import ADD, toy_renderer
from sparring.types import Message, ReplyPiece, ToolCall

TEXTS = (
    ' {"name": "add", "arguments": {"a": 1}} ',
    '{"name": "add"',
    "</think>",
    "<think>",
    "</tool_call>",
    "<tool_call>",
    "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    "\n \n",
    "été 答え 🙂",
    "</thi",
    "<tool",
    "{" * 30,
)


def renderer_of(name: str, thinking: bool):
    return toy_renderer(name="template", thinking=thinking) if name == "template" else format_renderer(name, thinking)


def joined(pieces: Sequence[ReplyPiece]) -> Message:
    """The message that pieces are together."""
    texts = {"reasoning": "", "text": ""}
    for piece in pieces:
        if piece.call is None:
            texts[piece.kind] += piece.text
    calls = tuple(piece.call for piece in pieces if piece.call is not None)
    return Message(role="assistant", content=texts["text"], reasoning=texts["reasoning"] or None, tool_calls=calls)


def pieces_of(renderer, tokens: Sequence[int], prompt: Sequence[int], cuts: Sequence[int]) -> list[ReplyPiece]:
    reader, pieces = renderer.reader((ADD,), prompt=prompt), []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        pieces += reader.read(tokens[start:end])
    return pieces


def check(renderer, tokens: Sequence[int], cuts: Sequence[int]) -> list[ReplyPiece]:
    """Pieces and what is left of the whole reply are the whole reply, in the order of its parts."""
    prompt = renderer.render([Message(role="user", content="Hi")], (ADD,)).tokens
    whole = renderer.parse(tokens, (ADD,), prompt=prompt)
    pieces, shown = pieces_of(renderer, tokens, prompt, cuts), ShownReply()
    for piece in pieces:
        shown.add(piece)
    every = [*pieces, *shown.rest(whole)]
    assert joined(every) == whole
    order = ["reasoning", "text", "call"]
    assert [piece.kind for piece in every] == sorted((piece.kind for piece in every), key=order.index)
    return pieces


def random_reply(renderer, chance: random.Random) -> tuple[list[int], list[int]]:
    """Ids of tags, of texts and of anything, and where they are cut."""
    added = list(renderer.tokenizer.added_tokens.values())
    tags = [renderer.tokenizer.added_tokens[tag] for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    tokens: list[int] = []
    for _ in range(chance.randrange(12)):
        kind = chance.randrange(8)
        if kind < 3:
            tokens.append(chance.choice(tags))
        elif kind == 3:
            tokens.append(chance.choice(added))
        elif kind < 6:
            tokens += renderer.tokenizer.encode(chance.choice(TEXTS))
        else:
            tokens += [chance.randrange(renderer.tokenizer.vocab_size) for _ in range(chance.randrange(4))]
    cuts = sorted(chance.randrange(len(tokens) + 1) for _ in range(chance.randrange(8)))
    return tokens, cuts if chance.randrange(2) else list(range(1, len(tokens)))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["template", *READ_BY_TAGS])
def test_pieces_are_a_beginning_of_the_whole_reply(name: str, thinking: bool) -> None:
    renderer, chance = renderer_of(name, thinking), random.Random(f"{name}{thinking}")
    for _ in range(150):
        check(renderer, *random_reply(renderer, chance))


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["template", *READ_BY_TAGS])
def test_pieces_of_many_replies_are_a_beginning_of_them(name: str, thinking: bool) -> None:
    renderer = renderer_of(name, thinking)
    for seed in range(5000):
        check(renderer, *random_reply(renderer, random.Random(seed)))


@pytest.mark.parametrize("name", ["template", *READ_BY_TAGS])
def test_a_reply_is_shown_as_it_is_sampled(name: str) -> None:
    renderer = renderer_of(name, False)
    call = ToolCall(id="call_0", name="add", arguments={"a": 1, "b": 2})
    message = Message(role="assistant", content="I add the two numbers.", tool_calls=(call, call))
    tokens = reply_tokens(renderer, message, (ADD,))
    pieces = check(renderer, tokens, range(1, len(tokens)))
    texts = [piece.text for piece in pieces if piece.kind == "text"]
    assert "".join(texts) == message.content and len(texts) > 5
    assert [piece.call.arguments for piece in pieces if piece.call is not None] == [call.arguments] * 2


@pytest.mark.parametrize("name", ["template", *READ_BY_TAGS])
def test_a_thought_is_shown_as_it_is_sampled(name: str) -> None:
    renderer = renderer_of(name, True)
    text = "<think>\nLet me see, 2 + 2.\n</think>\n\nIt is 4."
    tokens = renderer.tokenizer.encode(text)
    pieces = check(renderer, tokens, range(1, len(tokens)))
    kinds = [piece.kind for piece in pieces]
    assert joined(pieces).reasoning == "Let me see, 2 + 2." and kinds.count("reasoning") > 5 and kinds.count("text") > 3


@pytest.mark.parametrize("name", ["template", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("value", ["[" * 100_000, "1" * 5000], ids=["deep", "long"])
def test_a_call_that_breaks_the_parser_is_malformed_and_no_other_is(name: str, value: str) -> None:
    renderer = renderer_of(name, True)

    def called(value: str) -> str:
        if name == "qwen3.5":
            return f"<function=add>\n<parameter=a>\n{value}\n</parameter>\n</function>"
        return f'{{"name": "add", "arguments": {{"a": {value}}}}}'

    thought, good, bad = (
        renderer.tokenizer.encode(text)
        for text in (
            "<think>\nHm.\n</think>\n\nSo.",
            f"\n<tool_call>\n{called('1')}\n</tool_call>",
            f"\n<tool_call>\n{called(value)}\n</tool_call>",
        )
    )
    for calls in ([good, bad], [bad, good]):
        tokens = [*thought, *calls[0], *calls[1]]
        check(renderer, tokens, range(0, len(tokens), 997))
        whole = renderer.parse(tokens, (ADD,))
        assert (whole.reasoning, whole.content, len(whole.tool_calls)) == ("Hm.", "So.", 2)
        assert whole.tool_calls[calls.index(good)].arguments == {"a": 1}
        if name != "qwen3.5" or value.startswith("["):
            of_bad = whole.tool_calls[calls.index(bad)]
            assert of_bad.arguments is None and of_bad.raw == called(value)


def test_a_format_of_other_tags_says_nothing_before_the_end() -> None:
    renderer = format_renderer("llama-3")
    tokens = renderer.tokenizer.encode("It is 4.")
    assert check(renderer, tokens, range(1, len(tokens))) == []


def test_an_unfinished_character_and_blanks_wait() -> None:
    renderer = toy_renderer()
    reader, shown = renderer.reader(()), []
    for token in renderer.tokenizer.encode("a 🙂  b"):
        shown.append("".join(piece.text for piece in reader.read([token])))
    assert "".join(shown) == "a 🙂  b" and "\N{REPLACEMENT CHARACTER}" not in "".join(shown)
    assert shown[-1] == "  b"
