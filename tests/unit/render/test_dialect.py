"""Calls that no tool could be given."""

from __future__ import annotations

import pytest

from sparring.record.identity import message_key
from sparring.render.dialect import DEEPEST
from sparring.render.hermes import call_in
from sparring.types import Message


@pytest.mark.parametrize(("levels", "read"), [(DEEPEST - 1, True), (DEEPEST, False), (700, False), (5000, False)])
def test_a_call_is_read_as_far_as_it_can_be_compared(levels: int, read: bool) -> None:
    """JSON's own reader goes deeper than whatever compares two messages."""
    value = "[" * levels + "]" * levels
    call = call_in(0, f'{{"name": "look", "arguments": {{"at": {value}}}}}</tool_call>')
    assert (call.arguments is not None) == read and call.name == "look"
    assert message_key(Message(role="assistant", tool_calls=(call,)))


def test_numbers_of_thousands_of_digits_are_no_arguments() -> None:
    call = call_in(0, f'{{"name": "look", "arguments": {{"at": {"9" * 5000}}}}}</tool_call>')
    assert call.arguments is None and call.name == "look"
