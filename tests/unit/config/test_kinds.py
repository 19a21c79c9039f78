"""Tables of several kinds, told apart by their `name`: what is wrong with one is said in the words of its kind."""

import pytest

from sparring.errors import BadInput
from sparring.recipe.load import from_data
from sparring.recipe.run_config import RunConfig, dump

BASE = {"run": {"name": "x"}, "models": {"policy": {"path": "/x"}}, "env": {"name": "reasoning_gym"}}


def preference_config(**preference) -> RunConfig:
    return from_data({**BASE, "preference": preference}, "r")


def test_a_named_loss_survives_a_dump():
    import tomllib

    config = preference_config(loss={"name": "ipo", "beta": 0.2})
    assert type(config.preference.loss).__name__ == "Ipo" and config.preference.loss.beta == 0.2
    assert from_data(tomllib.loads(dump(config)), "again") == config


def test_a_name_alone_is_a_table_and_a_table_without_one_is_the_defaults():
    assert preference_config(loss="kto") == preference_config(loss={"name": "kto"})
    assert preference_config(loss={"beta": 0.2}) == preference_config(loss={"name": "dpo", "beta": 0.2})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            {"name": "zpo"},
            'r: preference.loss.name: expected one of "dpo", "robust_dpo", "ipo"',
        ),
        (
            "zpo",
            'r: preference.loss.name: expected one of "dpo", "robust_dpo", "ipo"',
        ),
        (
            {"name": "simpo", "gama": 1.0},
            "r: preference.loss.gama: expected one of beta",
        ),
        (
            {"name": "simpo", "gamma": "a"},
            "r: preference.loss.gamma: expected a number",
        ),
        (
            {"name": "kto", "gamma": 1.0},
            "r: preference.loss.gamma: expected one of beta",
        ),
    ],
    ids=["name", "alone", "typo", "type", "stranger"],
)
def test_a_wrong_key_is_refused_at_its_place(loss, message):
    with pytest.raises(BadInput) as refused:
        preference_config(loss=loss)
    assert str(refused.value).startswith(message)
