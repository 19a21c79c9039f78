"""Replies that are read while they are sampled: pieces are a beginning of what the whole reply is parsed as, and
nothing is ever taken back."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from formats import NO_TOOLS, format_folder, format_renderer

from sparring.errors import BadInput
from sparring.render.demonstrate import reply_tokens
from sparring.render.load import load_renderer
from sparring.render.tags import FORMAT_TAGS, Tags
from sparring.reply import ShownReply
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
    '{"name": "add", "parameters": {"a": 1}}',
    "</｜DSML｜invoke>",
    "<|tool_call_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<|tool_call_section_end|>",
)
CALLS_AT_THE_END = (*(name for name, tags in FORMAT_TAGS.items() if tags.goes_on), "deepseek-v4", "llama-3")
CALL = ToolCall(id="call_0", name="add", arguments={"a": 1, "b": 2})


def renderer_of(name: str, thinking: bool):
    return toy_renderer(name="template", thinking=thinking) if name == "template" else format_renderer(name, thinking)


def prompt_of(renderer) -> Sequence[int]:
    """A prompt with a tool, where the format has a place for one."""
    return renderer.render([Message(role="user", content="Hi")], () if renderer.name in NO_TOOLS else (ADD,)).tokens


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
    prompt = prompt_of(renderer)
    whole = renderer.parse(tokens, (ADD,), prompt=prompt)
    pieces, shown = pieces_of(renderer, tokens, prompt, cuts), ShownReply()
    for piece in pieces:
        shown.add(piece)
    every = [*pieces, *shown.rest(whole)]
    assert joined(every) == whole
    order = ["reasoning", "text", "call"]
    assert [piece.kind for piece in every] == sorted((piece.kind for piece in every), key=order.index)
    return pieces


def tag_ids(renderer) -> list[int]:
    """Ids of the tags of a format."""
    tags = FORMAT_TAGS.get(renderer.name, Tags())
    texts = (*(tags.think or ()), *(tags.call or ()), *(tags.section or ()), *tags.opens, *tags.heads, tags.middle)
    added = renderer.tokenizer.added_tokens
    return [added[text] for text in dict.fromkeys(texts) if text in added]


def reply_of(renderer, content: str, *calls: ToolCall) -> tuple[Message, Sequence[int]]:
    """A reply and its ids, with a thought where a prompt of the format leaves no other."""
    for reasoning in (None, "So."):
        message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
        try:
            return message, reply_tokens(renderer, message, () if renderer.name in NO_TOOLS else (ADD,))
        except BadInput:
            continue
    message, tokens = reply_of(format_renderer("deepseek-v3"), content, *calls)  # of deepseek-r1, which drops thoughts
    return message, (*renderer.tokenizer.encode("So.</think>"), *tokens)


@pytest.mark.parametrize("name", ["template", *(name for name, tags in FORMAT_TAGS.items() if tags.think)])
def test_the_length_of_a_thought_is_where_the_rest_of_the_reply_begins(name: str) -> None:
    renderer = renderer_of(name, True)
    prompt = prompt_of(renderer)
    begin = () if renderer.parse(renderer.tokenizer.encode("x"), (), prompt=prompt).reasoning else tag_ids(renderer)[:1]
    begin = renderer.tokenizer.encode("<think>") if name == "template" and begin == [] else begin
    encode = renderer.tokenizer.encode
    end = encode(FORMAT_TAGS[name].think[1] if name in FORMAT_TAGS else "</think>")
    tokens = [*begin, *encode("So été."), *end, *encode("Then."), renderer.stop_ids[0]]
    whole = renderer.parse(tokens, (ADD,), prompt=prompt)
    assert (whole.reasoning, whole.content) == ("So été.", "Then.")
    length = renderer.thought_length(tokens)
    assert length == len(begin) + len(encode("So été.")) + len(end)
    thought = renderer.parse(tokens[:length], (ADD,), prompt=prompt)
    assert (thought.reasoning, thought.content) == ("So été.", "")
    assert renderer.thought_length(tokens[: length - len(end)]) == length - len(end), "a thought that was cut"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", [name for name, tags in FORMAT_TAGS.items() if tags.think])
def test_a_thought_is_counted_to_its_end_for_any_order_of_tags(name: str, thinking: bool) -> None:
    """Of every order of up to four tags and words: the ids that are counted have the whole thought and nothing else,
    and stop behind its end, at a tag, or where the reply ends."""
    renderer = format_renderer(name, thinking)
    prompt = prompt_of(renderer)
    tags, stop = tag_ids(renderer), renderer.stop_ids[0]
    end = renderer.tokenizer.added_tokens.get(FORMAT_TAGS[name].think[1])
    words = itertools.chain.from_iterable(
        itertools.product([renderer.tokenizer.encode("x")[0], *tags], repeat=length) for length in range(1, 5)
    )
    counted = 0
    for tokens in words:
        whole = renderer.parse(tokens, (ADD,), prompt=prompt)
        if whole.reasoning:
            counted += 1
            length = renderer.thought_length((*tokens, stop))
            thought = renderer.parse(tokens[:length], (ADD,), prompt=prompt)
            assert (thought.reasoning, thought.content, thought.tool_calls) == (whole.reasoning, "", ()), tokens
            assert length == len(tokens) or tokens[length - 1] == end or tokens[length] in tags, tokens
    assert counted > 20 or not thinking, "a prompt that has ended the thought leaves few or none"


@functools.cache
def called(renderer) -> tuple[int, ...]:
    """Ids of a whole call, as the format writes it."""
    _, tokens = reply_of(renderer, "", CALL)
    return tuple(tokens[:-1] if tokens[-1] in renderer.stop_ids else tokens)


def random_reply(renderer, chance: random.Random) -> tuple[list[int], list[int]]:
    """Ids of tags, of texts and of anything, and where they are cut."""
    added, tags = list(renderer.tokenizer.added_tokens.values()), tag_ids(renderer)
    tokens: list[int] = []
    for _ in range(chance.randrange(12)):
        kind = chance.randrange(9)
        if kind < 3:
            tokens.append(chance.choice(tags))
        elif kind == 3:
            tokens.append(chance.choice(added))
        elif kind < 6:
            tokens += renderer.tokenizer.encode(chance.choice(TEXTS))
        elif kind == 6:
            tokens += called(renderer)
        else:
            tokens += [chance.randrange(renderer.tokenizer.vocab_size) for _ in range(chance.randrange(4))]
    cuts = sorted(chance.randrange(len(tokens) + 1) for _ in range(chance.randrange(8)))
    return tokens, cuts if chance.randrange(2) else list(range(1, len(tokens)))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["template", *FORMAT_TAGS])
def test_pieces_are_a_prefix_of_the_parsed_reply(name: str, thinking: bool) -> None:
    renderer, chance = renderer_of(name, thinking), random.Random(f"{name}{thinking}")
    for _ in range(150):
        check(renderer, *random_reply(renderer, chance))


def check_every_order(renderer, most: int, texts: Sequence[str] = ()) -> None:
    """Pieces are a beginning of every reply of at most so many tags, words and blanks."""
    added, encode = renderer.tokenizer.added_tokens, renderer.tokenizer.encode
    tags = FORMAT_TAGS[renderer.name]
    others = [id for id in added.values() if id not in (*tag_ids(renderer), *renderer.stop_ids)]
    words = ["x", " ", "\n", *tags.undecided, *tags.spelled[:1], *texts]
    parts = [*((id,) for id in tag_ids(renderer)), (renderer.stop_ids[0],), (others[0],), *map(encode, words)]
    for count in range(most + 1):
        for chosen in itertools.product(parts, repeat=count):
            tokens = [id for part in chosen for id in part]
            check(renderer, tokens, range(1, len(tokens)))


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", FORMAT_TAGS)
def test_pieces_are_a_prefix_for_every_order_of_three_tags(name: str, thinking: bool) -> None:
    check_every_order(renderer_of(name, thinking), 3)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "kimi-k2.5"])
def test_a_thought_whose_tags_are_no_ids_waits(name: str, tmp_path: Path) -> None:
    file = format_folder(name, tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace("<think>", "<unused_0>").replace("</think>", "<unused_1>"))
    renderer = load_renderer(tmp_path, name)
    check_every_order(renderer, 3, ("<think>", "</think>", "<thi", "nk>"))
    tokens = renderer.tokenizer.encode("It is <think> that I say.")
    thinks = name == "kimi-k2.5"  # its prompts begin a thought
    assert len(check(renderer, tokens, range(1, len(tokens)))) > 5 or thinks


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMAT_TAGS)
def test_pieces_are_a_prefix_for_every_order_of_four_tags(name: str) -> None:
    check_every_order(renderer_of(name, True), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["template", *FORMAT_TAGS])
def test_pieces_of_many_random_replies_are_a_prefix(name: str) -> None:
    renderer = renderer_of(name, True)
    for seed in range(2000):
        check(renderer, *random_reply(renderer, random.Random(seed)))


@pytest.mark.parametrize("name", ["template", *FORMAT_TAGS])
def test_a_reply_is_shown_as_it_is_sampled(name: str) -> None:
    renderer = renderer_of(name, False)
    message, tokens = reply_of(renderer, "I add the two numbers.", *((CALL, CALL) if name != "llama-3" else ()))
    pieces = check(renderer, tokens, range(1, len(tokens)))
    texts = [piece.text for piece in pieces if piece.kind == "text"]
    assert "".join(texts).strip() == message.content and len(texts) > 5
    shown = [piece.call.arguments for piece in pieces if piece.call is not None]
    assert shown == ([] if name in CALLS_AT_THE_END else [CALL.arguments] * 2)


@pytest.mark.parametrize("name", ["template", *(name for name in FORMAT_TAGS if name != "llama-3")])
def test_a_thought_is_shown_as_it_is_sampled(name: str) -> None:
    renderer = renderer_of(name, True)
    think, think_end = FORMAT_TAGS.get(name, Tags()).think
    text = f"{think}\nLet me see, 2 + 2.\n{think_end}\n\nIt is 4."
    tokens = renderer.tokenizer.encode(text)
    pieces = check(renderer, tokens, range(1, len(tokens)))
    kinds = [piece.kind for piece in pieces]
    assert joined(pieces).reasoning == "Let me see, 2 + 2." and kinds.count("reasoning") > 5 and kinds.count("text") > 3


@pytest.mark.parametrize("name", ["template", "qwen3", "qwen3.5"])
@pytest.mark.parametrize("value", ["[" * 100_000, "1" * 5000], ids=["deep", "long"])
def test_only_the_call_that_breaks_the_parser_is_malformed(name: str, value: str) -> None:
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


@pytest.mark.parametrize("name", [name for name in FORMAT_TAGS if name != "llama-3"])
@pytest.mark.parametrize("value", ["[" * 3000, "1" * 5000], ids=["deep", "long"])
def test_a_call_that_breaks_the_parser_takes_no_text_back(name: str, value: str) -> None:
    renderer = renderer_of(name, False)
    _message, tokens = reply_of(renderer, "I add.", CALL, replace(CALL, id="call_1", arguments={"a": 3}))
    tokens = renderer.tokenizer.encode(renderer.decode(tokens).replace("3", value))
    pieces = check(renderer, tokens, range(0, len(tokens), 997))
    prompt = prompt_of(renderer)
    whole = renderer.parse(tokens, (ADD,), prompt=prompt)
    assert whole.content.strip() == "I add." and whole.tool_calls
    if name not in CALLS_AT_THE_END:
        if name != "minimax-m2":  # whose calls stand between the tags together
            assert whole.tool_calls[0].arguments == CALL.arguments and len(whole.tool_calls) == 2
        assert whole.tool_calls == tuple(piece.call for piece in pieces if piece.call is not None)


def test_a_format_without_known_tags_emits_nothing_before_the_end() -> None:
    renderer = format_renderer("inkling")
    tokens = renderer.tokenizer.encode("It is 4.")
    assert check(renderer, tokens, range(1, len(tokens))) == []


def test_an_unfinished_character_and_blanks_wait() -> None:
    renderer = toy_renderer()
    reader, shown = renderer.reader(()), []
    for token in renderer.tokenizer.encode("a 🙂  b"):
        shown.append("".join(piece.text for piece in reader.read([token])))
    assert "".join(shown) == "a 🙂  b" and "\N{REPLACEMENT CHARACTER}" not in "".join(shown)
    assert shown[-1] == "  b"
