"""How much memory a run holds at the most, from its recipe and the sizes of its policy alone."""

from __future__ import annotations

from typing import NamedTuple

from sparring.config import RunConfig
from sparring.stages.context import POLICY
from sparring.stages.reference import is_held, is_moving
from sparring.stages.shape import Shape, token_bytes

NUMBER_BYTES = 4
"""Everything is counted in float32."""


class Held(NamedTuple):
    """What a run on one machine holds: how many parameters, how many of them (or of an adapter) are trained, how many a critic
    has, of how many a moving average is kept, and bytes.

    trainer: weights (and adapters), of what is trained gradients and AdamW's three, the critic's too, and models that are only
    asked. engine: weights of its own. packed: what the kernels of all these read in the place of the weights. update: what is
    trained once as it was published and, staged beside the engine's, once as weights and once packed. cache: keys and values
    here and in host memory, and recurrent states. activations: of a micro-batch.
    """

    parameters: int
    trained: int
    critic: int
    averaged: int
    trainer: int
    engine: int
    packed: int
    update: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self[4:])

    @staticmethod
    def of(config: RunConfig, shape: Shape, critic: Shape | None = None) -> Held:
        """A bound: all of it at once, the head apart from the embedding. `critic` is the shape of the rl stage's."""
        parameters, adapters = _parameters(shape), _adapters(config, shape)
        judging = 0 if critic is None else _parameters(critic)
        trained = adapters or parameters
        averaged = trained if "rl" in config.run.stages and is_moving(config) else 0
        # of a float32 model the average is among the weights of the reference, which are frozen
        beside = averaged if config.models[POLICY].dtype != "float32" else 0
        whole = parameters + adapters
        frozen = _frozen(config) * whole
        per_token = shape.num_layers * (12 * shape.hidden_size + 4 * shape.intermediate_size) + 2 * shape.vocab_size
        return Held(
            parameters=parameters,
            trained=trained,
            critic=judging,
            averaged=averaged,
            trainer=(whole + 3 * trained + frozen + beside + 4 * judging) * NUMBER_BYTES,
            engine=whole * NUMBER_BYTES,
            packed=(2 * whole + frozen + judging) * NUMBER_BYTES,
            update=3 * trained * NUMBER_BYTES if "rl" in config.run.stages else 0,
            cache=_cache(config, shape),
            activations=config.train.token_budget * per_token * NUMBER_BYTES,
        )


def _parameters(shape: Shape) -> int:
    width = shape.hidden_size
    per_layer = width * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return shape.num_layers * (per_layer + 3 * width * shape.intermediate_size) + 2 * shape.vocab_size * width


def _adapters(config: RunConfig, shape: Shape) -> int:
    """An adapter has a row for each input and each output of seven linear layers, at the most."""
    lora = config.models[POLICY].lora
    ends = 7 * shape.hidden_size + 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim + 3 * shape.intermediate_size
    return 0 if lora is None else shape.num_layers * lora.rank * ends


def _frozen(config: RunConfig) -> int:
    """Models of the policy's size that the reinforcement-learning stage only asks: a reference, a reward model."""
    if "rl" not in config.run.stages:
        return 0
    return is_held(config) + (config.rl.reward_model is not None)


def _cache(config: RunConfig, shape: Shape) -> int:
    engine = config.engine
    here = engine.kv_tokens * token_bytes(shape, config.models[POLICY].dtype) or engine.kv_bytes
    states = 0 if shape.num_attending == shape.num_layers else engine.kv_bytes
    return here + states + (engine.offload_bytes if engine.kv_across_turns == "offload" else 0)
