"""Choices of a client by which a reply has to call a tool, or may call some alone, as a constraint on the reply."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import typed
from sparring.generation import Constraint
from sparring.types import ToolSpec

PARALLEL = "parallel_tool_calls"
"""Field by which OpenAI's clients say that a reply has one call at most; noted where no call has to be made."""


def forced_call(
    tools: Sequence[ToolSpec], names: Sequence[str] | None = None, *, parallel: bool = True, where: str = "tool_choice"
) -> Constraint:
    """Return the constraint of a reply that has to call.

    Args:
        tools: of the request.
        names: of the tools that may be called; None for all.
        parallel: whether there may be several calls.
        where: the field that says so.

    Raises:
        BadInput: there is no tool to call, or a name is none of a tool.
    """
    return _constraint(_chosen(tools, names, where), parallel, text=False)


def allowed_calls(
    tools: Sequence[ToolSpec],
    names: Sequence[str],
    *,
    parallel: bool = True,
    validated: bool = False,
    where: str = "tool_choice",
) -> Constraint | None:
    """Return the constraint of a reply that may be text, and may call some tools alone. The prompt shows all the
    same, so that the conversation goes on. None where these are all tools, unless their calls are `validated`.

    Args:
        tools: of the request.
        names: of the tools that may be called.
        parallel: whether there may be several calls.
        validated: whether arguments keep to their schemas, whatever tools there are.
        where: the field that says so.

    Raises:
        BadInput: there is no tool to call, or a name is none of a tool.
    """
    chosen = _chosen(tools, names, where)
    return None if len(chosen) == len(tools) and not validated else _constraint(chosen, parallel, text=True)


def _chosen(tools: Sequence[ToolSpec], names: Sequence[str] | None, where: str) -> list[ToolSpec]:
    """Return the tools that are named."""
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
    """Return the noted fields of a request without the one that a forced call obeys."""
    return tuple(name for name in noted if constraint is None or name != PARALLEL)
