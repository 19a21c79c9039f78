"""The page of fields is what the dialects do with them."""

import json
import runpy
from pathlib import Path

import pytest

from sparring.errors import BadInput
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientCall
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses

PAGE = Path(__file__).resolve().parents[3] / "docs/harnesses.md"
WRITER = runpy.run_path(str(PAGE.with_name("write_harnesses.py")))
HI = [{"role": "user", "content": "Hi"}]
CONTENTS = [{"role": "user", "parts": [{"text": "Hi"}]}]
READ = {
    "chat": lambda field: ChatCompletions().read(ClientCall(body={"model": "policy", "messages": HI, **field})),
    "responses": lambda field: Responses().read(ClientCall(body={"model": "policy", "input": "Hi", **field})),
    "messages": lambda field: Messages().read(ClientCall(body={"model": "policy", "messages": HI, **field})),
    "gemini": lambda field: Gemini().read(ClientCall(body={"contents": CONTENTS, **field})),
    "gemini.generationConfig": lambda field: Gemini().read(
        ClientCall(body={"contents": CONTENTS, "generationConfig": field})
    ),
}


def test_the_page_is_written_from_the_sets() -> None:
    assert PAGE.read_text().startswith(WRITER["page"]()), "run: python docs/write_harnesses.py"


@pytest.mark.parametrize("name", READ)
def test_each_field_is_obeyed_noted_or_refused(name: str) -> None:
    """An obeyed field of a wrong type may be refused for that, and never as one that cannot be obeyed."""
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
    for field in obeyed:
        try:
            READ[name]({field: json.loads("[3]")})
        except BadInput as error:
            assert "a field that can be obeyed" not in str(error)
