"""What `sparring check` says a run holds: everything that is there at once, once."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sparring.config import RunConfig
from sparring.model.config import InitConfig
from sparring.model.kernels import pages
from sparring.model.library import Senses
from sparring.model.load import load
from sparring.model.lora import fresh_state
from sparring.model.save import skeleton
from sparring.model.targets import targeted
from sparring.stages.memory import Held, shapes_of
from sparring.stages.shape import Shape, folder_shape, token_bytes
from sparring.testing.tiny_adapters import tiny_adapter
from sparring.testing.tiny_models import FEATURES, tiny_model

INIT = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 1000}
SHAPE = Shape.of(msgspec.convert({**INIT, "intermediate_size": 128}, InitConfig))
PARAMETERS = 2 * 64 * 1000 + 3 * (64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 128)
LARGE, SMALL = (msgspec.structs.replace(SHAPE, num_layers=layers, num_attending=layers) for layers in (30, 1))
LARGE_PARAMETERS, SMALL_PARAMETERS = 128_000 + 30 * 36_864, 128_000 + 36_864
OTHERS = {"large": LARGE, "small": SMALL}
GIB = 1 << 30
COMPARED = {"preference": {"name": "dpo"}}
"""Of `[rl]`: the reference is asked."""


def held_config(
    stages: tuple[str, ...], *, models: dict | None = None, rl: dict | None = None, policy: dict | None = None, **sections: dict
) -> RunConfig:
    rubric = sections.pop("rubric", None)
    document = {
        "run": {"name": "a", "stages": stages},
        "models": {"policy": {"path": "there", **(policy or {})}, **(models or {})},
        "env": {"data": "rows.jsonl", "rubric": rubric} if rubric else {"name": "reverse"},
        "rl": rl or {},
        **sections,
        "engine": {"kv_bytes": GIB, **sections.get("engine", {})},
    }
    return msgspec.convert(document, RunConfig)


def held(*stages: str, shape: Shape = SHAPE, others: dict[str, Shape] | None = None, **settings: dict) -> Held:
    return Held.of(held_config(stages or ("rl",), **settings), {"policy": shape, **(others or {})})


def weights(found: Held) -> int:
    """Bytes of weights, of whatever kind."""
    return found.trainer + found.engine + found.packed + found.update


def test_weights_are_there_ten_times_in_a_step_that_updates_the_engine() -> None:
    """In the trainer with gradients, two moments and packed; in the engine with the packed ones; published; staged with the
    packed ones."""
    found = held()
    assert found.parameters == found.trained == PARAMETERS
    assert weights(found) == 10 * PARAMETERS * 4
    assert weights(held("distill")) == 10 * PARAMETERS * 4


@pytest.mark.parametrize(
    ("stage", "copies", "caches"), [("init", 1, 0), ("sft", 5, 0), ("preference", 5, 0), ("reward_model", 5, 0), ("eval", 2, 1)]
)
def test_a_stage_holds_what_it_works_with(stage: str, copies: int, caches: int) -> None:
    """A trainer is five copies, of which one is packed; an engine two; what publishes nothing has no update."""
    found = held(stage)
    assert (weights(found), found.cache, found.update) == (copies * PARAMETERS * 4, caches * GIB, 0)
    assert bool(found.activations) == (copies == 5)


def test_the_stage_that_holds_most_counts() -> None:
    """Models are closed when their stage ends."""
    assert held("sft", "rl", "eval") == held("rl") and held("rl").stage == "rl"
    assert held("sft", "rl", "eval").total < held("sft").total + held("rl").total


def test_a_reference_and_a_reward_model_are_there_too() -> None:
    """Each as weights and packed; in the stages that ask them alone."""
    assert weights(held(rl=COMPARED)) - weights(held()) == 2 * PARAMETERS * 4
    assert held(rl={"preference": {"name": "simpo"}}) == held()
    assert weights(held(rl={**COMPARED, "reward_model": "reward_model"})) - weights(held(rl=COMPARED)) == 2 * PARAMETERS * 4
    assert held("sft", rl=COMPARED) == held("sft")
    judged = {"reward_model": "large"}
    assert weights(held("eval", rl=judged)) - weights(held("eval")) == 2 * PARAMETERS * 4


def test_a_reward_model_has_its_own_size() -> None:
    judged = {"reward_model": "large"}
    assert weights(held(rl=judged, others=OTHERS)) - weights(held()) == 2 * LARGE_PARAMETERS * 4
    assert weights(held("eval", rl=judged, others=OTHERS)) - weights(held("eval")) == 2 * LARGE_PARAMETERS * 4


def test_teachers_are_there_with_an_engine_each_or_beside_the_trainer() -> None:
    taught = {"teachers": {"a": "large", "b": "large", "c": "small", "*": "policy"}, "over": "top_k", "feedback": "sibling"}
    extra = (LARGE_PARAMETERS + SMALL_PARAMETERS) * 2 * 4
    served = held("distill", distill=taught, others=OTHERS)
    assert weights(served) - weights(held("distill")) == extra and served.cache == 3 * GIB
    whole = {"teachers": {"a": "large", "*": "small"}, "over": "vocabulary"}
    beside = held("distill", distill=whole, others=OTHERS)
    assert weights(beside) - weights(held("distill")) == extra and beside.cache == GIB
    elsewhere = {"large": {"path": "x", "served": {"url": "http://a/v1"}}, "small": {"path": "y"}}
    found = held("distill", distill=taught, models=elsewhere, others=OTHERS)
    assert weights(found) - weights(held("distill")) == SMALL_PARAMETERS * 2 * 4


def test_judges_are_there_wherever_the_world_is_played() -> None:
    asked = {"kind": "judge", "model": "large", "prompt": "{completion}?", "choices": {"yes": 1.0}}
    rubric = {"kind_one": asked, "other": {**asked, "model": "large"}}
    for stage in ("rl", "distill", "eval", "collect", "sft"):
        models = {"teacher": {"path": "x"}, "large": {"path": "y"}}
        with_judge = held(stage, rubric=rubric, models=models, others=OTHERS)
        without = held(stage, models=models, others=OTHERS)
        assert weights(with_judge) - weights(without) == 2 * LARGE_PARAMETERS * 4, stage
        assert with_judge.cache - without.cache == GIB
    assert held("preference", rubric=rubric, others=OTHERS) == held("preference")


def test_who_is_collected_from_is_served_alone() -> None:
    found = held("collect", collect={"model": "large"}, models={"large": {"path": "x"}}, others=OTHERS)
    assert (weights(found), found.cache) == (2 * LARGE_PARAMETERS * 4, GIB) and found.activations == 0
    assert held("collect", "sft", collect={"model": "large"}, others=OTHERS).stage == "collect"


def test_a_moving_average_is_a_reference_of_its_own_numbers() -> None:
    """Of a float32 model they are the weights of the reference; of another, what is trained once more."""

    def of(stage: str = "rl", **settings: object) -> Held:
        kl = {"coefficient": 0.1, **{key: settings.pop(key) for key in ("reference", "estimator") if key in settings}}
        return held(stage, algo={"kl": kl}, policy=settings)

    start, average = of(), of(reference="average")
    assert weights(start) - weights(held()) == 2 * PARAMETERS * 4
    assert weights(average) == weights(start) and weights(of(reference="last")) == weights(held())
    assert (average.averaged, of(reference="last").averaged, start.averaged) == (PARAMETERS, 0, 0)
    assert of(reference="last", estimator="full") == average
    assert weights(of(reference="average", dtype="bfloat16")) == weights(start) + PARAMETERS * 4
    assert 0 < of(reference="average", lora={"rank": 4}).averaged == of(lora={"rank": 4}).trained < PARAMETERS
    assert of("sft", reference="average") == held("sft")


def test_a_moving_teacher_is_computed_beside_the_trainer() -> None:
    taught = {"teachers": {"*": "average"}, "feedback": "sibling"}
    found = held("distill", distill=taught)
    assert weights(found) - weights(held("distill")) == 2 * PARAMETERS * 4 and found.cache == GIB
    assert found.averaged == PARAMETERS and held("rl", "distill", distill=taught).averaged == PARAMETERS
    assert held("rl", distill=taught).averaged == 0


def test_of_a_model_below_adapters_there_are_four_copies() -> None:
    found = held(policy={"lora": {"rank": 4}})
    assert found.parameters == PARAMETERS and 0 < found.trained < PARAMETERS
    packed = found.update // 4 - 2 * found.trained
    assert weights(found) == (4 * PARAMETERS + 7 * found.trained + 3 * packed) * 4
    assert packed > 10 * found.trained, "of rank 4 a panel of 64"


@pytest.mark.parametrize("section", ["critic", "implicit"])
@pytest.mark.parametrize(("model", "parameters"), [("policy", PARAMETERS), ("large", LARGE_PARAMETERS)])
def test_what_learns_beside_the_policy_is_there_five_times(section: str, model: str, parameters: int) -> None:
    """Its weights, gradients, two moments and the packed ones; it publishes nothing and nobody serves it."""
    beside, alone = held(rl={section: {"model": model}}, others=OTHERS), held()
    assert beside.learner == parameters and alone.learner == 0
    assert beside.total - alone.total == 5 * parameters * 4


def test_the_sizes_of_every_model_are_read_where_it_lies(tmp_path: Path) -> None:
    """Of those that the run's stages compute here; a model that nobody asks is not looked for."""
    tiny_model("qwen3", tmp_path)
    models = {name: {"path": str(tmp_path)} for name in ("judge", "teacher", "critic", "reward")}
    models["nobody"] = {"path": "/nowhere"}
    asked = {"kind": "judge", "model": "judge", "prompt": "{completion}?", "choices": {"yes": 1.0}}
    rl = {"critic": {"model": "critic"}, "reward_model": "reward"}
    config = held_config(("rl", "distill"), models=models, rl=rl, rubric={"a": asked}, distill={"teachers": {"*": "teacher"}})
    found = shapes_of(config, SHAPE)
    assert set(found) == {"policy", "judge", "teacher", "critic", "reward"} and found["policy"] == SHAPE
    assert all(shape == folder_shape(tmp_path) for name, shape in found.items() if name != "policy")


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
    assert held(engine=engine).cache == expected


def test_recurrent_states_take_as_much_as_the_cache() -> None:
    assert held(shape=msgspec.structs.replace(SHAPE, num_attending=1)).cache == 2 * GIB


ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2, "moe_layer_start_index": 0}


def test_what_else_sizes_of_experts_are_called(tmp_path: Path) -> None:
    path = tiny_model("ernie4_5_moe", tmp_path, **ERNIE)
    assert folder_shape(path).experts_size == 8 * 24
    actual = sum(parameter.numel() for name, parameter in skeleton(path).named_parameters() if "bias" not in name)
    assert actual <= 1.01 * held(shape=folder_shape(path)).parameters < 1.2 * actual
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "moe_num_experts": [6, 4], "moe_intermediate_size": [24, 16]}))
    assert folder_shape(path).experts_size == 8 * 24, "the most that a layer has"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_packed_factors_are_counted_as_large_as_they_are(family: str, tmp_path: Path) -> None:
    """Small ranks are padded."""
    base = tiny_model(family, tmp_path / "base")
    stacks = () if family == "qwen3" else ("experts.gate_up_proj", "experts.down_proj")
    adapter = load(tiny_adapter(base, tmp_path / "adapter", rank=3, target_parameters=stacks)).adapters.everywhere
    with torch.no_grad():
        pairs = [pair for delta in adapter.deltas.values() for pair in (delta.pairs() if hasattr(delta, "pairs") else [(delta.a, delta.b)])]
    shape = folder_shape(base)
    lora, none = (held(shape=shape, policy=policy) for policy in ({"lora": {"rank": 3, "target_parameters": stacks}}, {}))
    of_one = (lora.packed - none.packed) / 2  # trainer and engine
    assert 0.4 * of_one < sum(one.storage.nbytes for pair in pairs for one in pair) <= of_one


LOOSE = {"gemma4_text": 1.5, "mimo_v2_flash": 1.4, "nemotron_h": 3.0, "gpt2": 1.2, "deepseek_v2": 1.6, "deepseek_v3": 1.6, "glm4_moe": 1.4, "gpt_neox": 1.2, "phi": 1.2}
"""Families whose layers differ, or have latent attention or an MLP without a gate: how far above their parameters the bound may be."""


@pytest.mark.parametrize("family", ["llama", *FEATURES])
def test_no_family_has_more_parameters_than_are_counted(family: str, tmp_path: Path) -> None:
    """But for norms, biases and convolutions; nor an adapter of all its linear layers and experts. Layers of Nemotron-H are of
    many kinds and count as the largest."""
    path = tiny_model(family, tmp_path)
    module, shape = skeleton(path), folder_shape(path)
    Senses(module).leave()
    actual = sum(parameter.numel() for name, parameter in module.named_parameters() if parameter.dim() in (2, 3) and "bias" not in name and "conv" not in name)
    stacks = ("experts.gate_up_proj", "experts.down_proj") if shape.num_experts and family != "nemotron_h" else ()
    found = held(shape=shape, policy={"lora": {"rank": 3, "target_parameters": stacks}})
    assert actual <= found.parameters < LOOSE.get(family, 1.1) * actual
    adapter = fresh_state(module, targeted(module, "all-linear", stacks), 3, 1.0, seed=0)
    assert sum(value.numel() for value in adapter.values()) - 1 <= found.trained


MANY = {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6}


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), *((family, {}) for family in FEATURES), ("gemma4_text", MANY)])
def test_a_token_keeps_what_its_config_says(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path, **settings)
    model = load(path, numerics="fast")
    assert token_bytes(folder_shape(path), "float32") == pages.token_bytes(model.kv_heads, model.dtype)


def test_what_a_config_leaves_out_the_library_knows(tmp_path: Path) -> None:
    """Published configs of Gemma 3 are without several of its sizes."""
    path = tiny_model("gemma3", tmp_path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for name in ("num_attention_heads", "head_dim", "vocab_size", "max_position_embeddings"):
        del config["text_config"][name]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = folder_shape(path)
    assert (shape.num_heads, shape.head_dim, shape.vocab_size, shape.max_positions) == (8, 256, 262_208, 131_072)
