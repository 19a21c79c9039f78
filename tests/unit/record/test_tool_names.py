"""The tool of a world that a name of a client stands for."""

from __future__ import annotations

import pytest

from sparring.record.tool_names import stands_for, tool_meant


@pytest.mark.parametrize(
    ("sampled", "tool"),
    [
        *((name, "add") for name in ("add", "mcp__world__add", "mcp_world_add", "world_add", "world-add", "world.add")),
        *((name, "quick_add") for name in ("quick_add", "world_quick_add", "world-quick-add")),
        *((name, None) for name in ("badd", "ad", "world_addition", "Add", "", None)),
    ],
)
def test_a_name_means_the_longest_tool_that_it_ends_with(sampled: str | None, tool: str | None) -> None:
    assert tool_meant(sampled, ("add", "quick_add")) == tool


def test_an_equal_name_has_precedence_over_a_spelling() -> None:
    assert tool_meant("wörld", ("w_rld", "wörld", "wärld")) == "wörld"
    assert tool_meant("mcp__x__w_rld", ("wörld",)) == "wörld" and not stands_for("mcp__x__world", "wörld")


@pytest.mark.parametrize("name", ["", "add", "mcp__world__add", "_"])
def test_no_name_means_an_unnamed_tool(name: str) -> None:
    assert stands_for(name, "") == (name == "")
