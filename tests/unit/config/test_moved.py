"""Keys of earlier versions: they load as the new ones do, are told once, and are refused beside the new ones."""

from __future__ import annotations

import logging
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from refusals import refused_at

from sparring.errors import BadInput
from sparring.recipe import moved
from sparring.recipe.load import from_data, load, load_recorded
from sparring.recipe.run_config import RunConfig

BASE: dict[str, Any] = {"run": {"name": "old"}, "models": {"policy": {"path": "model"}}, "env": {"name": "reverse"}}
OLD: dict[str, Any] = {
    "run.cluster": "inline",
    "rollout.gateway": "http://10.0.0.5:9000",
    "rollout.retries": 4,
    "rollout.task_retries": 5,
    "rollout.retry_delay_s": 0.25,
    "rollout.rewards_within_s": 9.0,
    "rollout.rewards_under": "any_key",
    "rollout.policy_failure_reward": -0.5,
    "rollout.box_timeout_s": 1.0,
    "rollout.open_timeout_s": 2.0,
    "rollout.turn_timeout_s": 3.0,
    "rollout.tool_timeout_s": 4.0,
    "rollout.score_timeout_s": 5.0,
    "rollout.close_timeout_s": 6.0,
    "rollout.stalled_s": 7.0,
    "rollout.outage_s": 8.0,
    "rollout.temperature": 0.5,
    "rollout.top_p": 0.9,
    "rollout.top_k": 20,
    "rollout.min_p": 0.1,
    "rollout.logit_bias": ((3, 1.5),),
    "rollout.max_turn_tokens": 99,
    "rollout.min_turn_tokens": 2,
    "rollout.stop_strings": ("END",),
    "rollout.constraint": {"kind": "regex", "source": "a+"},
    "rollout.max_turns": 11,
    "rollout.max_tokens": 12,
    "rollout.max_tool_calls": 13,
    "rollout.timeout_s": 14.0,
    "rollout.listen": "0.0.0.0:9100",
    "rollout.lease_s": 15.0,
    "rollout.shown_to_workers": ("repository",),
    "engine.url": "http://10.0.0.6:8000",
    "engine.max_running": 16,
    "engine.max_batch_tokens": 17,
    "engine.kv_tokens": 18,
    "engine.kv_bytes": 19,
    "engine.kv_across_turns": "offload",
    "engine.idle_kv_bytes": 20,
    "engine.offload_bytes": 21,
    "engine.share_prefixes": False,
    "engine.live_kv": "drain",
    "engine.update_timeout_s": 22.0,
    "engine.update_retries": 23,
    "engine.update_retry_delay_s": 24.0,
}


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    moved.told.clear()


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with values by dotted key."""
    recipe: dict[str, Any] = {section: dict(table) for section, table in BASE.items()}
    for key, value in values.items():
        *tables, name = key.split(".")
        at = recipe
        for table in tables:
            at = at.setdefault(table, {})
        at[name] = value
    return recipe


def test_every_old_key_loads_as_its_new_one() -> None:
    assert OLD.keys() == moved.MOVED.keys()
    new = {moved.MOVED[key]: (value,) if key == "engine.url" else value for key, value in OLD.items()}
    config = from_data(nested({**OLD, "engine.kind": "remote"}), "old.toml")
    assert config == from_data(nested({**new, "engine.kind": "remote"}), "new.toml")
    kept = {key: attrgetter(key)(config) for key in new if key != "rollout.sampling.constraint"}
    assert kept == {key: value for key, value in new.items() if key != "rollout.sampling.constraint"}
    assert config.rollout.sampling.constraint is not None and config.rollout.sampling.constraint.source == "a+"


def test_a_recorded_recipe_of_before_loads_untold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.toml"
    lines = ["[run]", 'name = "old"', "[models.policy]", 'path = "model"', "[env]", 'name = "reverse"', "[rollout]"]
    file.write_text("\n".join([*lines, "retries = 4", "temperature = 0.5", "[engine]", "kv_bytes = 19", ""]))
    with caplog.at_level(logging.WARNING):
        config = load_recorded(file)
    assert (config.rollout.retries.rebuilds, config.rollout.sampling.temperature) == (4, 0.5)
    assert config.engine.kv.bytes == 19 and not caplog.messages


def test_overrides_take_the_old_spelling_too() -> None:
    settings = (
        "rollout.temperature=0.5",
        "rollout.retries=2",
        "rollout.gateway=http://10.0.0.5:9000",
        "rollout.constraint.kind=regex",
        "rollout.constraint.source=a+",
        "engine.kv_tokens=64",
    )
    config = from_data(BASE, "the test", settings)
    assert (config.rollout.sampling.temperature, config.rollout.retries.rebuilds) == (0.5, 2)
    assert config.rollout.gateway.url == "http://10.0.0.5:9000" and config.engine.kv.tokens == 64
    assert config.rollout.sampling.constraint is not None and config.rollout.sampling.constraint.kind == "regex"


def test_an_override_of_a_whole_table_takes_the_old_spelling_too() -> None:
    settings = ("rollout={temperature=0.5, retries=2}", "engine={kv_tokens=64, kv={bytes=9}}")
    config = from_data(BASE, "the test", settings)
    assert (config.rollout.sampling.temperature, config.rollout.retries.rebuilds) == (0.5, 2)
    assert (config.engine.kv.tokens, config.engine.kv.bytes) == (64, 9)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("rollout.temperatur", "rollout.sampling.temperature"),
        ("rollout.top-p", "rollout.sampling.top_p"),
        ("rollout.tool_timeout", "rollout.timeouts.tool_s"),
        ("rollout.kv_bytes", "engine.kv.bytes"),
        ("rollout.sampling.max_tokens", "rollout.limits.max_tokens"),
        ("rollout.retries.retries", "rollout.retries.rebuilds"),
        ("rollout.timeouts.retries", "rollout.retries.rebuilds"),
        ("engine.kv.max_running", "engine.batch.max_running"),
        ("gateway.listen", "rollout.gateway"),
    ],
)
def test_a_key_in_the_wrong_place_or_misspelt_is_pointed_to_its_table(wrong: str, meant: str) -> None:
    with pytest.raises(BadInput) as refused:
        from_data(nested({wrong: 1}), "the test")
    assert str(refused.value).endswith(f"do you mean {meant}?")


def test_new_tables_of_an_old_name_are_new(caplog: pytest.LogCaptureFixture) -> None:
    recipe = nested({"rollout.retries.groups": 1, "rollout.gateway.lease_s": 5.0})
    with caplog.at_level(logging.WARNING):
        config = from_data(recipe, "the test", ("rollout.retries.rebuilds=1", "rollout.gateway.listen=127.0.0.1:1"))
    assert (config.rollout.retries.rebuilds, config.rollout.retries.groups) == (1, 1)
    assert (config.rollout.gateway.lease_s, config.rollout.gateway.listen) == (5.0, "127.0.0.1:1")
    assert not caplog.messages


def test_the_new_spelling_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def told(*settings: str) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            from_data(nested({"rollout.temperature": 0.5, "engine.kv_bytes": 19}), "old.toml", settings)
        return caplog.messages

    (first,) = told()
    assert first.startswith("old.toml: ")
    assert (
        "rollout.temperature is rollout.sampling.temperature" in first and "engine.kv_bytes is engine.kv.bytes" in first
    )
    (second,) = told("rollout.top_k=3", "rollout.temperature=1")
    assert second.startswith("--set rollout.top_k=3: ") and "temperature" not in second
    assert told("rollout.top_k=3") == []


@pytest.mark.parametrize(
    ("values", "settings", "place", "noun"),
    [
        (
            {"rollout.temperature": 1.0, "rollout.sampling.temperature": 0.5},
            (),
            "rollout.sampling.temperature",
            "spelling",
        ),
        ({"rollout.retries": 1.5}, (), "rollout.retries.rebuilds", "an integer"),
        ({"rollout.temperature": -1.0}, (), "rollout.sampling", "temperature"),
        ({"rollout.sampling": 3, "rollout.temperature": 1.0}, (), "rollout.sampling", "a table"),
        ({}, ("rollout.kv_bytes=3",), "rollout.kv_bytes", "key"),
        ({}, ("rollout.sampling.max_turns=3",), "rollout.sampling.max_turns", "rollout.limits.max_turns?"),
        ({}, ("engine.share_prefixes.a=3",), "engine.kv.share_prefixes", "true or false"),
        ({}, ("engine.max_running=0",), "engine.batch", "max_running"),
        ({"rollout.gateway": [{"address": "http://10.0.0.5:9000"}]}, (), "rollout.gateway", "a table"),
        ({}, ("rollout.retries=[3]",), "rollout.retries", "a table"),
        ({}, ("engine={kv={tokens=1}, kv_tokens=2}",), "engine.kv.tokens", "spelling"),
    ],
)
def test_bad_values_of_old_keys_are_refused(values: Any, settings: tuple[str, ...], place: str, noun: str) -> None:
    source = f"--set {settings[0]}" if settings else "old.toml"
    with refused_at(f"{source}: {place}", noun):
        from_data(nested(values), "old.toml", settings)


def test_a_recipe_with_old_keys_is_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        '[run]\nname = "old"\n[models.policy]\npath = "model"\n[env]\nname = "reverse"\n[rollout]\nmax_turns = 3\n'
    )
    config: RunConfig = load(file)
    assert config.rollout.limits.max_turns == 3
