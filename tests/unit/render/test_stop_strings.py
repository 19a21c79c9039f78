"""Stop strings end a turn at the token that completes them, however the text falls apart into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused_at

from sparring.render.stop_strings import StopStrings
from sparring.testing.toy import toy_renderer


def tokenizer():
    return toy_renderer().tokenizer


def expected(tokens: list[int], strings: list[str]) -> int | None:
    """The shortest beginning whose whole text holds one of the strings."""
    return next(
        (n for n in range(1, len(tokens) + 1) if any(s in tokenizer().decode(tokens[:n]) for s in strings)), None
    )


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("ab \nxé漢🙂answer46."), max_size=40),
    strings=st.lists(st.text(st.sampled_from("ab \nxé漢🙂answer46."), min_size=1, max_size=5), min_size=1, max_size=3),
    pieces=st.integers(1, 16),
)
def test_it_ends_where_the_text_first_holds_a_string(text: str, strings: list[str], pieces: int) -> None:
    tokens, stops = tokenizer().encode(text), StopStrings(tokenizer(), strings)
    found = None
    for begin in range(0, len(tokens), pieces):
        known = tokens[: begin + pieces]
        found = stops(known, len(known) - begin)
        if found is not None:
            break
    assert found == expected(tokens, strings)


def test_a_string_across_tokens_and_one_that_was_there_before() -> None:
    tokens = tokenizer().encode("What is 12 + 34? The answer is 46.")
    stops = StopStrings(tokenizer(), ["er is"])
    count = stops(tokens, len(tokens))
    assert tokenizer().decode(tokens[:count]).rstrip().endswith("er is") and count == expected(tokens, ["er is"])
    assert stops(tokens, len(tokens) - count) is None, "what was complete before the new tokens does not count again"


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_no_string_and_an_empty_one_are_refused(strings: list[str]) -> None:
    with refused_at("stop strings", "at least one"):
        StopStrings(tokenizer(), strings)
