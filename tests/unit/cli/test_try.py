"""`sparring try`: a program that knows nothing of us plays on a script, and the user reads what a run would make of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.generation import Constraint
from sparring.launch.scripted_replies import Wanted, said_to
from sparring.types import Message, ToolCall, ToolSpec

ASKS = """
import json, os, urllib.error, urllib.request

def post(path, body, **headers):
    data = json.dumps(body).encode()
    request = urllib.request.Request(path, data, {"content-type": "application/json", **headers})
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return json.load(error)

user = {"role": "user", "content": "What is there?"}
key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
chat, tools = os.environ["OPENAI_BASE_URL"] + "/chat/completions", [{"type": "function", "function": {
    "name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["door"]}}, "required": ["at"]}}}]
reply = post(chat, {"model": "gpt-4o", "messages": [user], "tools": tools, "seed": 1}, **key)["choices"][0]["message"]
(call,) = reply["tool_calls"]
assert json.loads(call["function"]["arguments"]) == {"at": "door"}
answer = {"role": "tool", "tool_call_id": call["id"], "content": "A mat."}
post(chat, {"model": "gpt-4o", "messages": [user, reply, answer], "tools": tools}, **key)
post(chat, {"model": "gpt-4o", "messages": [user], "logit_bias": {"1": 2}}, **key)
key = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
body = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": "What is here?"}]}
post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, **key)
post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages/count_tokens", {"model": "claude"}, **key)
key = {"x-goog-api-key": os.environ["GEMINI_API_KEY"]}
path = os.environ["GOOGLE_GEMINI_BASE_URL"] + "/v1beta/models/gemini-3:generateContent"
post(path, {"contents": [{"parts": [{"text": "Who?"}]}]}, **key)
"""


def tried(program: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = main(["try", *options, "--", sys.executable, "-c", program])
    return status, capsys.readouterr().out


def test_trial_prints_each_request_and_the_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = tried(ASKS, capsys)
    assert status == 0
    for line in (
        "1. POST /v1/chat/completions: 200\n   model gpt-4o, 1 messages, tools: look\n   noted, without effect: seed",
        'calls look({"at": "door"})\n   begins the conversation',
        "This is the answer.\n   goes on",
        "3. POST /v1/chat/completions: 400\n   refused: logit_bias: expected a field that can be obeyed",
        "4. POST /v1/messages: 200\n   model claude",
        "begins a branch: tools, message 0",
        "5. POST /v1/messages/count_tokens: 400\n   refused: messages: ",
        "6. POST /v1beta/models/gemini-3:generateContent: 200\n   model gemini-3",
        "4 turns, 3 branches; the prompts of 4 are, id for id, what the engine was given",
        "completed: the program ended with status 0",
    ):
        assert line in out, out


def test_a_program_that_does_nothing_or_breaks_does_not_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = tried("", capsys)
    assert status == 1 and "infra_failed: the program ended with status 0 and requested no reply" in out
    assert main(["try", "false"]) == 1


def test_the_scripted_policy_replies_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "replies.jsonl"
    calls = {"tool_calls": [{"name": "look", "arguments": {"at": "door"}}]}
    file.write_text("\n".join(map(json.dumps, (calls, {"content": "Nothing \x1b[31mis there."}))))
    _, out = tried(ASKS, capsys, "--replies", str(file), "--max-turns", "2")
    assert "Nothing \\x1b[31mis there." in out and "truncated, max_turns" in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "COMMAND: expected a program"),
        (["no-such-program"], "COMMAND: expected a program that can be run"),
        (["--max-turns", "0", "true"], "--max-turns: expected at least 1"),
        (["--timeout", "nan", "true"], "--timeout: expected more than 0 seconds"),
        (["--replies", "no.jsonl", "true"], "no.jsonl: expected a file of replies"),
        (["--replies", "{bad}", "true"], "bad.jsonl:2: expected a JSON object"),
    ],
)
def test_wrong_input_is_refused(argv: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"content": "Yes."}\n{"contents": "No."}\n')
    assert main(["try", *(part.format(bad=bad) for part in argv)]) == 2
    assert text in capsys.readouterr().err


def test_a_scripted_reply_meets_tools_and_constraints_of_its_request() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}
    tools = [ToolSpec(name=name, description="", parameters=schema) for name in ("one", "two")]
    user = Message(role="user", content="Hi")
    called = Message(role="assistant", tool_calls=(ToolCall(id="a", name="one", arguments={}),))
    held = Constraint(kind="json_schema", source=json.dumps(schema))
    forced = Constraint(kind="tool_call", source=json.dumps({"tools": [{"name": "two", "parameters": schema}]}))
    assert said_to(Wanted(messages=(user,), tools=tuple(tools))).tool_calls[0].arguments == {"n": 3}
    assert said_to(Wanted(messages=(user, called), tools=tuple(tools))).tool_calls[0].name == "two"
    assert json.loads(said_to(Wanted(messages=(user,), tools=(), constraint=held)).content) == {"n": 3}
    assert said_to(Wanted(messages=(user,), tools=(), constraint=forced)).tool_calls[0].name == "two"


@pytest.mark.slow
def test_a_client_of_a_vendor_needs_nothing_but_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import openai
messages = [{"role": "user", "content": "Hi"}]
print(openai.OpenAI().chat.completions.create(model="gpt-4o", messages=messages, stream=False))
with openai.OpenAI().responses.stream(model="gpt-4o", input="Hello") as events:
    print(events.get_final_response().output_text)
"""
    status, out = tried(program, capsys)
    assert status == 0 and "2 turns, 2 branches; the prompts of 2 are" in out and "streamed" in out
