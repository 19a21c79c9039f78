"""Requests that schemathesis makes from our OpenAPI documents: no answer is a fault of the server's."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import jsonschema
import pytest
from common.served import ServerThread

from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model

pytestmark = pytest.mark.suites
KEY = "secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("served") / "tiny", tied=True, seed=4)
    thread = ServerThread(
        NativeEngine(load(folder), EngineConfig(batch=BatchConfig(max_running=8)), threads=1), folder, api_key=KEY
    )
    yield thread
    thread.stop()


def test_the_token_server_answers_or_refuses_whatever_its_document_allows(server: ServerThread) -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        document = client.get("/openapi.json").json()
        description: dict[str, Any] = copy.deepcopy(document)
        components = description["components"]["schemas"]
        components["SamplingForm"]["properties"]["max_tokens"] = {"type": "integer", "maximum": 8}  # each is sampled
        for form in ("GenerateForm", "ScoreRequestForm"):
            components[form]["properties"]["tokens"]["items"] = {"type": "integer", "minimum": -1, "maximum": 300}
        schema = schemathesis.openapi.from_dict(description)
        schema.config.update(base_url=server.url)
        modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        statuses = set()
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in modes if operation.body else modes[:1]:

                @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: Any) -> None:
                    answer = case.call(headers=headers)
                    statuses.add(answer.status_code)
                    assert answer.status_code in (200, 400, 401, 409, 422, 503), (
                        answer.text
                    )  # 503: an adapter is not loaded
                    described = document["paths"][case.path][case.method.lower()]["responses"]
                    assert str(answer.status_code) in described, answer.text
                    if answer.headers["content-type"] == "application/json":
                        body = described[str(answer.status_code)]["content"]["application/json"]["schema"]
                        whole = {"components": document["components"], **body}
                        jsonschema.validate(answer.json(), whole)

                check()
        assert {200, 400, 422} <= statuses
        assert client.get("/v1/model", headers=headers).json()["version"] == 0, "nothing moved the weights"
