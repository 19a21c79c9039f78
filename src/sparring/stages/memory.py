"""How much memory a run holds at the most, from its recipe and the sizes of its models alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sparring.config import RunConfig
from sparring.engine.config import EngineConfig
from sparring.envs.rubrics.config import judging
from sparring.model.hub import local_folder
from sparring.stages.config import CriticConfig, ImplicitConfig
from sparring.stages.context import LIVE, POLICY
from sparring.stages.reference import AVERAGE, is_averaging, is_held, reference_model
from sparring.stages.shape import Shape, folder_shape, token_bytes

NUMBER_BYTES = 4
"""Everything is counted in float32."""

PANEL, JOINED = 64, 3
"""Kernels multiply by so many outputs of a weight at once, and join up to so many layers."""

TRAINING = ("sft", "preference", "reward_model", *LIVE)
SERVING = (*LIVE, "eval")
PLAYING = ("init", "collect", "sft", *SERVING)
"""Stages in which the world is played, whose judges answer until the stage ends."""


class Held(NamedTuple):
    """What a run on one machine holds in the stage that holds most: models are closed when their stage ends. First how many
    parameters the policy has, how many of them (or of an adapter) are trained, how many a learner has that is trained beside it,
    a critic or an implicit reward model, of how many a moving average is kept; then bytes.

    trainer: weights (and adapters), of what is trained gradients and AdamW's three, the learner's too, and models that are only
    asked, such as a reference. engine: weights of engines, the policy's, teachers' and judges'. packed: what the kernels of all
    these read in the place of the weights. update: what is trained once as it was published and, staged beside the engine's, once
    as weights and once packed. cache: keys and values here and in host memory, and recurrent states. activations: of a
    micro-batch.
    """

    stage: str
    parameters: int
    trained: int
    learner: int
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
        return sum(self[5:])

    @staticmethod
    def of(config: RunConfig, shapes: Mapping[str, Shape]) -> Held:
        """A bound: all that a stage has at once, the head apart from the embedding. `shapes` are those of `shapes_of`."""
        every = [_held(config, shapes, stage) for stage in config.run.stages]
        return max(every, key=lambda held: held.total, default=_held(config, shapes, "none"))


def shapes_of(config: RunConfig, policy: Shape) -> dict[str, Shape]:
    """The sizes of every model that is computed in this process, by its name in `[models]`: of the policy, and of those with a
    checkpoint of their own. What has none is as large as the policy.

    Raises:
        BadInput: there is no such checkpoint.
    """
    names = {name for stage in config.run.stages for kind in _asked(config, stage) for name in kind}
    if (learner := _learner(config)) is not None:
        names.add(learner.model)
    paths = {name: config.models[name].path for name in names - {POLICY} if name in config.models}
    return {POLICY: policy, **{name: folder_shape(local_folder(path)) for name, path in paths.items() if path is not None}}


def _held(config: RunConfig, shapes: Mapping[str, Shape], stage: str) -> Held:
    policy = shapes[POLICY]
    parameters, (adapters, packed_adapters) = _parameters(policy), _adapters(config, policy)
    section = _learner(config)
    learner = 0 if section is None else _parameters(shapes.get(section.model, policy))
    trained, whole = adapters or parameters, parameters + adapters
    averaging = [name for name in config.run.stages if name in LIVE and is_averaging(config, name)]
    averaged = trained if averaging else 0
    # of a float32 model the average is the weights of a model that is only asked
    beside = averaged if stage in averaging and config.models[POLICY].dtype != "float32" else 0
    training, serving, learning = (stage in TRAINING) * whole, (stage in SERVING) * whole, (stage == "rl") * learner
    frozen, engines = _asked(config, stage)
    only_asked = sum(_parameters(shapes[name]) if name in shapes and name != POLICY else whole for name in frozen)
    others = sum(_parameters(shapes.get(name, policy)) for name in engines)
    copies = (stage in TRAINING) + (stage in SERVING) + sum(name not in shapes or name == POLICY for name in frozen)
    padding = copies * (packed_adapters - adapters)
    written = 0 if training or serving or others else whole  # init and export hold what they write
    per_token = policy.num_layers * (12 * policy.hidden_size + 4 * policy.intermediate_size) + 2 * policy.vocab_size
    return Held(
        stage=stage,
        parameters=parameters,
        trained=trained,
        learner=learner,
        averaged=averaged,
        trainer=(training + bool(training) * 3 * trained + only_asked + beside + 4 * learning + written) * NUMBER_BYTES,
        engine=(serving + others) * NUMBER_BYTES,
        packed=(training + serving + only_asked + others + learning + padding) * NUMBER_BYTES,
        update=(stage in LIVE) * (2 * trained + (packed_adapters or trained)) * NUMBER_BYTES,
        cache=sum(_cache(config, shapes, name) for name in [*([POLICY] if serving else []), *engines]),
        activations=bool(training) * config.train.token_budget * per_token * NUMBER_BYTES,
    )


def _learner(config: RunConfig) -> CriticConfig | ImplicitConfig | None:
    """What learns beside the policy; one credit asks for one of them at the most."""
    return (config.rl.critic or config.rl.implicit) if "rl" in config.run.stages else None


def _asked(config: RunConfig, stage: str) -> tuple[list[str], list[str]]:
    """The models that a stage has beside the policy and its learner: those whose weights are only computed with (a reference, a
    reward model, teachers over the whole vocabulary), and those with an engine of their own in this process."""
    frozen: list[str] = []
    engines: list[str] = []
    if stage == "rl" and is_held(config):
        frozen.append(reference_model(config))
    if stage in SERVING and config.rl.reward_model is not None:
        frozen.append(config.rl.reward_model)
    if stage == "distill":
        teachers = sorted(set(config.distill.teachers.values()) - {POLICY})  # that one is served already
        (frozen if config.distill.over == "vocabulary" else engines).extend(name for name in teachers if name != AVERAGE)
        frozen.extend(name for name in teachers if name == AVERAGE)
    if stage == "collect":
        engines.extend(sorted(set(config.collect.by_domain.values())))
    if stage in PLAYING:
        engines.extend(sorted(judging(config.env.rubric)))
    return frozen, [name for name in engines if name not in config.models or config.models[name].served is None]


def _parameters(shape: Shape) -> int:
    """Of matrices, as if every layer had the largest of what any has."""
    width, attention = shape.hidden_size, (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    router = shape.num_experts + 1 if shape.num_experts else 0  # and a gate of what all rows go through
    per_layer = max(attention, shape.delta_size) + router + 3 * shape.mlp_size
    inputs = shape.num_layers * shape.input_size * (shape.vocab_size + 3 * width)
    return (shape.num_layers * per_layer + 2 * shape.vocab_size + shape.num_positions) * width + inputs


def _adapters(config: RunConfig, shape: Shape) -> tuple[int, int]:
    """Numbers of an adapter, as it is and packed: A has `rank` rows of a linear layer's inputs, B as many columns of its outputs,
    for each linear layer and for two matrices of each expert. Packed, A has a multiple of `PANEL` rows, and B columns for up to
    `JOINED` layers of one product."""
    lora = config.models[POLICY].lora
    if lora is None:
        return 0, 0
    width, mlp = shape.hidden_size, shape.intermediate_size
    mixer = max((shape.num_heads + shape.num_kv_heads) * shape.head_dim, -(-shape.delta_size // 2))
    inputs, outputs = 6 * width + mixer + mlp, 2 * width + mixer + 2 * mlp
    if shape.input_size:  # a gate into each layer and a way back, and the layer's share of one matrix for all
        inputs, outputs = inputs + 2 * width + shape.input_size, outputs + width + 2 * shape.input_size
    of_experts = shape.num_experts * width if lora.target_parameters else 0
    stacked = shape.experts_size if lora.target_parameters else 0
    inputs, rows = inputs + of_experts + stacked, outputs + of_experts + 2 * stacked
    packed = -(-lora.rank // PANEL) * PANEL * inputs + lora.rank * (rows + (JOINED - 1) * outputs)
    return shape.num_layers * lora.rank * (inputs + rows), shape.num_layers * packed


def _cache(config: RunConfig, shapes: Mapping[str, Shape], name: str) -> int:
    """Of one engine. `[engine]` is the policy's; others have its settings where it is a native engine's."""
    engine = config.engine if name == POLICY or config.engine.kind == "native" else EngineConfig()
    shape, spec = shapes.get(name, shapes[POLICY]), config.models.get(name, config.models[POLICY])
    here = engine.kv_tokens * token_bytes(shape, spec.dtype) or engine.kv_bytes
    states = 0 if shape.num_attending == shape.num_layers else engine.kv_bytes
    return here + states + (engine.offload_bytes if engine.kv_across_turns == "offload" else 0)
