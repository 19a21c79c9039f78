"""Proof at start: which formats pass, with tools of several schemas, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from formats import FORMATS, NO_TOOLS, format_renderer
from refusals import refused_at

from sparring.errors import BadInput
from sparring.render.calls.samples import sample_arguments
from sparring.render.calls.schemas import KINDS, kinds_of_value
from sparring.render.round_trip import check_round_trip, check_tool_calls
from sparring.testing.toy import toy_renderer
from sparring.types import Message, ToolSpec

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
STEP = {"type": "object", "properties": {"path": TEXT, "size": {"type": "number"}, "next": {"$ref": "#/$defs/step"}}}


def tool(name: str, required: tuple[str, ...] = (), defs: Any = None, **properties: Any) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "required": list(required), "$defs": defs or {}}
    return ToolSpec(name=name, description="Does.", parameters=parameters)


TOOLS = (
    tool("look", ("at",), at=TEXT),
    tool("add", ("a", "b"), a=WHOLE, b=WHOLE),
    tool("done"),
    ToolSpec(name="ping", description="Pings.", parameters={}),
    tool("edit", ("path",), path=TEXT, all={"type": "boolean"}, mode={**TEXT, "enum": ["fast", "b c"]}),
    tool("find", where={"type": ["string", "null"]}, limit={"anyOf": [WHOLE, TEXT, {"type": "array", "items": TEXT}]}),
    tool("plan", defs={"step": STEP}, steps={"type": "array", "items": {"$ref": "#/$defs/step"}}, any={}, none={}),
    tool(
        "pick",
        defs={"step": STEP},
        kind={"enum": ["a", 3, None, True]},
        size={**WHOLE, "const": 2},
        near={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/step"}]},
    ),
    tool("aim", to={"oneOf": [{**TEXT, "enum": ["all"]}, WHOLE]}, end={"const": "end"}, what={"description": "Any."}),
)


def renderer_of(name: str, thinking: bool = False) -> Any:
    return toy_renderer(name="template", thinking=thinking) if name == "template" else format_renderer(name, thinking)


@pytest.mark.parametrize("name", NO_TOOLS)
def test_a_template_without_a_place_for_tools_refuses_them(name: str) -> None:
    with refused_at("tools", "a chat template that writes them"):
        check_tool_calls(renderer_of(name), TOOLS)


@pytest.mark.parametrize("name", ["template", *(name for name in FORMATS if name not in NO_TOOLS)])
def test_calls_of_every_schema_are_read_as_they_are_written(name: str) -> None:
    for thinking in (False, True):
        assert check_tool_calls(renderer_of(name, thinking), TOOLS).startswith("calls of 9 tools")


def test_kimi_declares_tools_in_typescript_and_all_of_them_in_json_where_a_schema_has_no_such_form() -> None:
    """As its own tokenizer does: `apply_chat_template` of Kimi K2.5."""
    renderer, user = renderer_of("kimi-k2.5"), Message(role="user", content="Who?")
    look, aim = TOOLS[0], TOOLS[-1]
    typed, plain = (renderer.decode(renderer.render([user], tools).tokens) for tools in ((look,), (look, aim)))
    head = "<|im_system|>tool_declare<|im_middle|>"
    assert typed.startswith(f"{head}# Tools\n\n## functions\nnamespace functions {{\n// Does.\ntype look = (_: ")
    declared, _, behind = plain.removeprefix(head).partition("<|im_end|>")
    functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in (look, aim)]
    told = [{"type": "function", "function": function} for function in functions]
    assert declared == json.dumps(told, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    assert behind == typed.partition("<|im_end|>")[2]


def test_a_format_that_leaves_thoughts_out_and_begins_each_reply_with_one_is_refused() -> None:
    with pytest.raises(BadInput, match="a reply that continues the generation prompt"):
        check_round_trip(renderer_of("deepseek-r1"), ())


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "deepseek-r1"])
def test_every_other_format_is_proven(name: str) -> None:
    tools = () if name in NO_TOOLS else TOOLS[:1]
    assert len(check_round_trip(renderer_of(name, True), tools)) >= 6


def test_samples_show_each_type_that_a_schema_allows_and_leave_out_what_may_be() -> None:
    seen: dict[str, set[str]] = {}
    for spec in TOOLS:
        made = list(sample_arguments(spec.parameters))
        assert all(set(spec.parameters.get("required", ())) <= arguments.keys() for arguments in made)
        assert len(made) == 1 or len({len(arguments) for arguments in made}) > 1 or spec.name in ("add", "look")
        for arguments in made:
            for key, value in arguments.items():
                seen.setdefault(key, set()).update(kinds_of_value(value))
    assert (
        seen["any"] == KINDS and seen["limit"] >= {"integer", "string", "array"} and seen["where"] == {"string", "null"}
    )
    assert seen["mode"] == {"string"} and seen["kind"] >= {"string", "integer", "null", "boolean"}
    assert seen["near"] == {"null", "object"} and seen["all"] == {"boolean"}


def test_a_tool_whose_calls_are_not_read_is_refused_by_its_name() -> None:
    with refused_at("tool a>b", "a call that parses to the same name"):
        check_tool_calls(renderer_of("qwen3.5"), (TOOLS[0], tool("a>b", x=TEXT)))
    with pytest.raises(BadInput, match=r"(?s)tool f: expected .*a>b.* got .*b>"):
        check_tool_calls(renderer_of("qwen3.5"), (tool("f", **{"a>b": TEXT}),))
