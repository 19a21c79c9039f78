"""What `sparring check` says a run holds: everything that is there at once, once."""

import msgspec
import pytest

from sparring.config import RunConfig
from sparring.model.config import InitConfig
from sparring.stages.memory import Held
from sparring.stages.shape import Shape

INIT = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 1000}
SHAPE = Shape.of(msgspec.convert({**INIT, "intermediate_size": 128}, InitConfig))
PARAMETERS = 2 * 64 * 1000 + 3 * (64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 128)
GIB = 1 << 30


def held_config(
    engine: dict, stages: tuple[str, ...], rl: dict | None = None, kl: dict | None = None, **policy: object
) -> RunConfig:
    document = {
        "run": {"name": "a", "stages": stages},
        "models": {"policy": {"path": "there", **policy}},
        "env": {"name": "reverse"},
        "engine": {"kv_bytes": GIB, **engine},
        "rl": rl or {},
        "algo": {"kl": kl or {}},
    }
    return msgspec.convert(document, RunConfig)


def held(engine: dict | None = None, shape: Shape = SHAPE, stages: tuple[str, ...] = ("rl",), **others: object) -> Held:
    return Held.of(held_config(engine or {}, stages, **others), shape)


def test_weights_are_there_ten_times_in_a_step_that_updates_the_engine() -> None:
    """In the trainer with gradients, two moments and packed; in the engine with the packed ones; published; staged with the
    packed ones. Without rollouts nothing is published."""
    found = held()
    assert found.parameters == found.trained == PARAMETERS
    assert found.trainer + found.engine + found.packed + found.update == 10 * PARAMETERS * 4
    assert found.total - held(stages=("sft",)).total == 3 * PARAMETERS * 4


def test_a_reference_and_a_reward_model_are_there_too() -> None:
    """Each as weights and packed; in the stage that asks them alone."""
    compared = {"preference": {"name": "dpo"}}
    assert held(rl=compared).total - held().total == 2 * PARAMETERS * 4
    assert held(rl={"preference": {"name": "simpo"}}).total == held().total
    assert held(rl={**compared, "reward_model": "judge"}).total - held().total == 4 * PARAMETERS * 4
    assert held(stages=("sft",), rl=compared).total == held(stages=("sft",)).total


def test_a_moving_average_is_a_reference_of_its_own_numbers() -> None:
    """Of a float32 model they are the weights of the reference; of another, and of an adapter, what is trained once more."""
    average, last = {"coefficient": 0.1, "reference": "average"}, {"coefficient": 0.1, "reference": "last"}
    start = held(kl={"coefficient": 0.1})
    assert start.total - held().total == 2 * PARAMETERS * 4
    assert held(kl=average).total == start.total and held(kl=last).total == held().total
    assert (held(kl=average).averaged, held(kl=last).averaged, start.averaged) == (PARAMETERS, 0, 0)
    assert held(kl={**last, "estimator": "full"}) == held(kl=average)
    assert held(kl=average, dtype="bfloat16").total == start.total + PARAMETERS * 4
    assert held(kl=average, lora={"rank": 4}).averaged == held(lora={"rank": 4}).trained < PARAMETERS
    assert held(stages=("sft",), kl=average) == held(stages=("sft",))


def test_of_a_model_below_adapters_there_are_four_copies() -> None:
    found = held(lora={"rank": 4})
    assert found.parameters == PARAMETERS and 0 < found.trained < PARAMETERS
    assert found.trainer + found.engine + found.packed + found.update == 4 * PARAMETERS * 4 + 10 * found.trained * 4


def test_a_critic_is_there_five_times_beside_the_policy() -> None:
    """Its weights, gradients, two moments and the packed ones; it publishes nothing and nobody serves it."""
    config = held_config({}, ("rl",))
    beside, alone = Held.of(config, SHAPE, SHAPE), Held.of(config, SHAPE)
    assert beside.critic == PARAMETERS and alone.critic == 0
    assert beside.total - alone.total == 5 * PARAMETERS * 4


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, GIB),
        ({"kv_tokens": 1600}, 1600 * 3 * 2 * 2 * 16 * 4),
        ({"kv_across_turns": "offload", "offload_bytes": 3 * GIB}, 4 * GIB),
        ({"kv_across_turns": "keep", "offload_bytes": 3 * GIB}, GIB),
    ],
)
def test_keys_and_values_here_and_in_host_memory(engine: dict, expected: int) -> None:
    assert held(engine).cache == expected


def test_recurrent_states_take_as_much_as_the_cache() -> None:
    assert held(shape=msgspec.structs.replace(SHAPE, num_attending=1)).cache == 2 * GIB
