"""Choices of a client that force calls or restrict them to some tools, as a constraint on the reply."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import typed
from sparring.generation import Constraint
from sparring.types import ToolSpec

PARALLEL = "parallel_tool_calls"
"""Field of OpenAI's clients that allows at most one call per reply. It only has an effect on constrained calls."""


def forced_call(
    tools: Sequence[ToolSpec], names: Sequence[str] | None = None, *, parallel: bool = True, where: str = "tool_choice"
) -> Constraint:
    """Return the constraint of a reply that must call.

    Args:
        tools: tools of the request.
        names: names of the tools that may be called; None: all.
        parallel: whether the reply may have several calls.
        where: field of the choice, for refusals.

    Raises:
        BadInput: there is no tool to call, or a name is unknown.
    """
    return _constraint(_choose(tools, names, where), parallel, text=False)


def allowed_calls(
    tools: Sequence[ToolSpec],
    names: Sequence[str],
    *,
    parallel: bool = True,
    validated: bool = False,
    where: str = "tool_choice",
) -> Constraint | None:
    """Return the constraint of a reply that is text or calls some tools only. None if these are all tools, unless
    `validated`.

    The prompt shows all tools regardless, so that it continues the conversation.

    Args:
        tools: tools of the request.
        names: names of the tools that may be called.
        parallel: whether the reply may have several calls.
        validated: whether arguments must match their schemas, whatever tools are chosen.
        where: field of the choice, for refusals.

    Raises:
        BadInput: there is no tool to call, or a name is unknown.
    """
    chosen = _choose(tools, names, where)
    return None if len(chosen) == len(tools) and not validated else _constraint(chosen, parallel, text=True)


def _choose(tools: Sequence[ToolSpec], names: Sequence[str] | None, where: str) -> list[ToolSpec]:
    """Return the tools with these names; None: all."""
    by_name = {tool.name: tool for tool in tools}
    for name in names or ():
        if typed(name, where, str, "the name of a tool") not in by_name:
            got = json.dumps(name, ensure_ascii=False)
            raise refusal(where, "the name of a tool of the request", got, "name one that is there")
    chosen = list(tools) if names is None else [by_name[name] for name in dict.fromkeys(names)]
    if not chosen:
        raise refusal(where, "a tool that may be called", "none", "send tools, or leave the choice to the policy")
    return chosen


def _constraint(tools: Sequence[ToolSpec], parallel: bool, text: bool) -> Constraint:
    listed = [{"name": tool.name, "parameters": dict(tool.parameters)} for tool in tools]
    return Constraint(kind="tool_call", source=json.dumps({"tools": listed, "parallel": parallel, "text": text}))


def without_parallel(noted: Sequence[str], constraint: Constraint | None) -> tuple[str, ...]:
    """Remove `PARALLEL` from the noted fields if a constraint obeys it."""
    return tuple(name for name in noted if constraint is None or name != PARALLEL)
