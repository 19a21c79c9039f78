"""Settings of the chat format that nobody reads, of models that judge the policy's tokens."""

from __future__ import annotations

from typing import Any

import pytest

from sparring.errors import BadInput
from sparring.recipe.load import from_data
from sparring.stages.preflight.run import check_unused_settings


def recipe(other: dict[str, Any], **policy: Any) -> Any:
    models = {"policy": {"path": "there", **policy}, "other": {"path": "elsewhere", **other}}
    run = {"name": "x", "stages": ["rl"]}
    return from_data(
        {"run": run, "models": models, "env": {"name": "none"}, "rl": {"critic": {"model": "other"}}}, "it"
    )


@pytest.mark.parametrize(
    ("other", "where"),
    [({"thinking": True}, "models.other.thinking"), ({"renderer": "template"}, "models.other.renderer")],
)
def test_a_setting_that_nobody_reads_is_refused(other: dict[str, Any], where: str) -> None:
    with pytest.raises(BadInput, match=f"^{where}: expected .*, as of models.policy"):
        check_unused_settings(recipe(other))


def test_the_policys_own_settings_may_be_repeated() -> None:
    check_unused_settings(recipe({}))
    check_unused_settings(recipe({"thinking": True, "renderer": "qwen3"}, thinking=True, renderer="qwen3"))
