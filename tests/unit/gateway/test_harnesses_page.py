"""The page of fields is what the dialects do with them."""

import runpy
from pathlib import Path

import jsonschema
import pytest

from sparring.errors import BadInput
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientCall
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses
from sparring.gateway.openapi import document

PAGE = Path(__file__).resolve().parents[3] / "docs/harnesses.md"
WRITER = runpy.run_path(str(PAGE.with_name("write_harnesses.py")))
HI = [{"role": "user", "content": "Hi"}]
CONTENTS = [{"role": "user", "parts": [{"text": "Hi"}]}]
VALUES = ([3], 3.5, "false", True, {"a": 1}, [[1]], 0, False, "", -1)
NAMES = {"gemini.generationConfig": "generationConfig."}
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/{model}:generateContent",
}
READ = {
    "chat": lambda field: ChatCompletions().read(ClientCall(body={"model": "policy", "messages": HI, **field})),
    "responses": lambda field: Responses().read(ClientCall(body={"model": "policy", "input": "Hi", **field})),
    "messages": lambda field: Messages().read(ClientCall(body={"model": "policy", "messages": HI, **field})),
    "gemini": lambda field: Gemini().read(ClientCall(body={"contents": CONTENTS, **field})),
    "gemini.generationConfig": lambda field: Gemini().read(
        ClientCall(body={"contents": CONTENTS, "generationConfig": field})
    ),
}


def test_the_page_lists_the_fields_of_the_dialects() -> None:
    assert PAGE.read_text().startswith(WRITER["page"]()), "run: python docs/write_harnesses.py"


@pytest.mark.parametrize("name", READ)
def test_each_field_is_obeyed_noted_or_refused(name: str) -> None:
    obeyed, noted = WRITER["SETS"][name]
    refused = {*WRITER["REFUSED"][name].split(), "a_new_field"}
    assert not obeyed & noted and not (obeyed | noted) & refused and WRITER["REMARKS"][name].keys() <= obeyed
    before = "generationConfig." if "." in name else ""
    for field in noted:
        assert READ[name]({field: {"a": 1}}).noted == (f"{before}{field}",)
    for field in refused:
        with pytest.raises(BadInput, match=f"^{before}{field}: expected a field that can be obeyed"):
            READ[name]({field: {"a": 1}})
    for field in obeyed | refused:
        assert READ[name]({field: None} if field not in ("model", "messages", "input", "contents") else {}).noted == ()


@pytest.mark.parametrize("name", READ)
def test_a_wrong_type_of_an_obeyed_field_is_refused(name: str) -> None:
    """What the OpenAPI document does not allow in a field is refused, and the refusal names the field."""
    obeyed, _ = WRITER["SETS"][name]
    posts = document()["paths"]
    fields = posts[PATHS[name.partition(".")[0]]]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "." in name:
        fields = fields["properties"]["generationConfig"]
    for field in obeyed:
        schema = fields["properties"][field]
        wrong = [value for value in VALUES if not jsonschema.Draft202012Validator(schema).is_valid(value)]
        assert len(wrong) >= 5, f"{field}: the document allows anything"
        for value in wrong:
            with pytest.raises(BadInput, match=f"^{NAMES.get(name, '')}{field}"):
                READ[name]({field: value})
