"""How many tokens are computed at once, where the recipe leaves it to the machine: a function of memory and model."""

import msgspec
import pytest

from sparring.model.config import InitConfig
from sparring.model.outline import outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.models.policy import train_of
from sparring.stages.preflight.memory import RunMemory
from sparring.stages.preflight.token_budget import LEAST_TOKENS, chosen, sized
from sparring.train.config import MOST_TOKENS

GIB = 1 << 30
SHAPE = {
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "max_positions": 256,
}
SHAPES = {"policy": outline(msgspec.convert(SHAPE, InitConfig))}


def recipe(**run: str) -> RunConfig:
    document = {
        "run": {"name": "a", "stages": ["rl"], "threads": 2, "device": "cpu", **run},
        "models": {"policy": {"init": SHAPE}},
        "env": {"name": "reverse"},
    }
    return msgspec.convert(document, RunConfig)


def total(tokens: int) -> int:
    config = recipe()
    train = msgspec.structs.replace(config.train, token_budget=tokens)
    return RunMemory.of(msgspec.structs.replace(config, train=train), SHAPES).total


def test_it_is_the_most_with_which_the_run_takes_half_of_the_memory() -> None:
    for tokens in (512, 2048, MOST_TOKENS):
        for memory, expected in ((2 * total(tokens), tokens), (2 * total(tokens) - 2, tokens // 2)):
            config, why = chosen(recipe(), SHAPES, memory)
            assert config.train.token_budget == expected
            assert config == msgspec.structs.replace(recipe(), train=config.train)
            assert f"train.token_budget = {expected}, the most" in why and f"{memory / GIB:.1f} GiB" in why
    assert chosen(recipe(), SHAPES, 1 << 50)[0].train.token_budget == MOST_TOKENS


def test_it_is_never_less_than_pays() -> None:
    config, why = chosen(recipe(), SHAPES, 1 << 20)
    assert config.train.token_budget == LEAST_TOKENS and "the least" in why and "more than half" in why


def test_what_the_process_has_already_counts() -> None:
    assert chosen(recipe(), SHAPES, 2 * total(2048), GIB)[0].train.token_budget < 2048


@pytest.mark.parametrize("tokens", [0, 1024])
def test_where_nobody_chooses_it_is_the_most(tokens: int) -> None:
    """A trainer made from Python, and a run on a GPU, whose memory is its own."""
    assert msgspec.structs.replace(recipe().train, token_budget=tokens).tokens_at_once == (tokens or MOST_TOKENS)
    config, why = sized(recipe(device="cuda"))
    assert (config.train.token_budget, why) == (MOST_TOKENS, "")


def test_a_stage_that_leaves_it_open_has_the_runs() -> None:
    config = recipe()
    config = msgspec.structs.replace(config, rl=msgspec.structs.replace(config.rl, train={"token_budget": 0}))
    for given, expected in ((0, MOST_TOKENS), (512, 512)):
        train = msgspec.structs.replace(config.train, token_budget=given)
        assert train_of(msgspec.structs.replace(config, train=train), "rl").tokens_at_once == expected
    assert chosen(config, SHAPES, 2 * total(512))[0].train.token_budget == 512


def test_the_layout_does_not_change_it() -> None:
    """Its bits depend on it."""
    config = recipe()
    for changes in ({"kind": "local", "ranks": 3}, {"kind": "local", "engines": 4}):
        apart = msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, **changes))
        assert chosen(apart, SHAPES, 2 * total(2048))[0].train.token_budget == 2048
