"""A user and a password in a URL would stand in the run's folder and in messages: they are refused, not repeated."""

from __future__ import annotations

import tomllib

import pytest

from sparring.engine.adapters.client import authorization
from sparring.errors import BadInput
from sparring.launch.evaluate import evaluated_as
from sparring.recipe.load import from_data
from sparring.recipe.url_secrets import has_user, masked

SECRET = "hunter2"
RECIPE = """
[run]
name = "secret"

[models.policy]
path = "."

[models.judge]
path = "."
served = { kind = "remote", url = "http://host:9000" }

[env]
name = "reasoning_gym"
args = { hosts = ["https://host/path"] }
"""


def data(text: str = RECIPE) -> dict[str, object]:
    return tomllib.loads(text)


@pytest.mark.parametrize(
    ("override", "place"),
    [
        (f'engine={{ kind = "remote", urls = ["http://user:{SECRET}@host:1"] }}', "engine.urls.0"),
        (f"models.judge.served.url=https://{SECRET}@host/v1", "models.judge.served.url"),
        (f"models.judge.served.url=user:{SECRET}@host:80", "models.judge.served.url"),
        (f"models.judge.served.url= HTTP://user:{SECRET}@host", "models.judge.served.url"),
        (f"rollout.gateway.url=http://user:{SECRET}@host:1", "rollout.gateway.url"),
        (f"rollout.gateway.listen=user:{SECRET}@127.0.0.1:0", "rollout.gateway.listen"),
        (f"env.args.hosts.0=postgresql://user:{SECRET}@host/base", "env.args.hosts.0"),
        (f"observe.wandb_project=//user:{SECRET}@host", "observe.wandb_project"),
    ],
)
def test_it_is_refused_wherever_it_stands(override: str, place: str) -> None:
    with pytest.raises(BadInput) as raised:
        from_data(data(), "the recipe", [override])
    said = str(raised.value)
    assert f": {place}: expected an address without a user" in said and "environment variable" in said
    assert SECRET not in said


@pytest.mark.parametrize("override", ["engine.urls.x=http://user:{}@host", "http://user:{}@host", "a..b=//x:{}@y"])
def test_no_other_complaint_repeats_it(override: str) -> None:
    with pytest.raises(BadInput) as raised:
        from_data(data(), "the recipe", [override.format(SECRET)])
    assert SECRET not in str(raised.value)


def test_the_last_word_counts() -> None:
    text = RECIPE.replace("http://host:9000", f"http://user:{SECRET}@host:9000")
    with pytest.raises(BadInput, match="^the recipe: models.judge.served.url: "):
        from_data(data(text), "the recipe", ["run.seed=1"])
    clean = from_data(data(text), "the recipe", ["models.judge.served.url=http://host:9000"])
    assert clean == from_data(data(), "the recipe")


def test_what_is_no_user_passes() -> None:
    for value in ("http://host/a@b", "http://host?mail=a@b", "unix:a@b.sock", "Ask http://a:b@c for it."):
        assert not has_user(value) and not has_user(value, "url")
    from_data(data(), "the recipe", ["env.args.prompt=Ask http://a:b@c for it.", "env.args.mail=a@b"])


def test_an_endpoint_on_the_command_line() -> None:
    with pytest.raises(BadInput, match="without a user") as raised:
        evaluated_as(from_data(data(), "the recipe"), f"http://user:{SECRET}@host/v1", None)
    assert SECRET not in str(raised.value)


def test_a_user_and_a_password_by_the_environment() -> None:
    assert authorization("") == {}
    assert authorization("sk-1") == {"authorization": "Bearer sk-1"}
    assert authorization("Basic dXNlcjpwYXNzd29yZA==") == {"authorization": "Basic dXNlcjpwYXNzd29yZA=="}
    assert masked(f"--set a=http://user:{SECRET}@host") == "--set a=http://...@host"
