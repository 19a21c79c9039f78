"""What `sparring check` says a run holds, against what models, trainers and engines really hold."""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from common.tiny_adapters import tiny_adapter
from suite import short_of
from tables import with_settings

from sparring.engine.config import EngineConfig
from sparring.kernels import pages
from sparring.model.attention import Packed
from sparring.model.config import InitConfig, LoraConfig
from sparring.model.load import load
from sparring.model.outline import Outline, outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.models.context_length import max_context, outline_of
from sparring.stages.preflight.memory import EARLIER, MemoryEstimate, RunMemory, checkpoint_bytes, shapes_of
from sparring.testing.tiny_models import FEATURES, tiny_model

INIT = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1024,
}
GIB = 1 << 30
COMPARED = {"preference": {"name": "dpo"}}
"""Of `[rl]`: the reference is asked."""
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")


@lru_cache
def sized(num_layers: int, **settings: Any) -> Outline:
    return outline(msgspec.convert({**INIT, "num_layers": num_layers, "max_positions": 256}, InitConfig), **settings)


LAYERS = {"policy": 3, "large": 30, "small": 1}


def held_config(
    stages: tuple[str, ...],
    *,
    models: dict | None = None,
    rl: dict | None = None,
    policy: dict | None = None,
    engine: dict | None = None,
    **sections: dict,
) -> RunConfig:
    rubric = sections.pop("rubric", None)
    document = {
        "run": {"name": "a", "stages": stages, "threads": 2},
        "models": {"policy": {"path": "there", **(policy or {})}, **(models or {})},
        "env": {"data": "rows.jsonl", "rubric": rubric} if rubric else {"name": "reverse"},
        "rl": rl or {},
        **sections,
        "train": {"token_budget": 16},  # so few that an update needs more than a micro-batch, on every path
    }
    config = msgspec.convert(document, RunConfig)
    return msgspec.structs.replace(config, engine=with_settings(EngineConfig(), **{"kv_tokens": 256, **(engine or {})}))


def planned(
    *stages: str, others: tuple[str, ...] = (), policy: dict | None = None, **settings: dict
) -> tuple[RunConfig, dict[str, Outline]]:
    config = held_config(stages or ("rl",), policy=policy, **settings)
    spec = config.models["policy"]
    shapes = {"policy": sized(LAYERS["policy"], dtype=spec.dtype, lora=spec.lora)}
    return config, {**shapes, **{name: sized(LAYERS[name]) for name in others}}


def whole(config: RunConfig, shapes: dict[str, Outline]) -> MemoryEstimate:
    """Return the memory of the run's process in its largest stage."""
    return RunMemory.of(config, shapes).largest[0].each


def held(*stages: str, **settings: Any) -> MemoryEstimate:
    return whole(*planned(*stages, **settings))


def saved(*stages: str, **settings: Any) -> int:
    return checkpoint_bytes(*planned(*stages, **settings))


def both(model: Outline) -> int:
    """Bytes of a model that only computes."""
    return model.weights + model.packed + model.tables


def weights(found: MemoryEstimate) -> int:
    return found.weights + found.packed


POLICY, LARGE, SMALL = (sized(LAYERS[name]) for name in ("policy", "large", "small"))
OTHERS = ("large", "small")


def test_the_largest_parts_are_told_with_what_makes_them_smaller() -> None:
    found = held("rl")._replace(step=3 * GIB, cache=2 * GIB, weights=GIB)
    assert found.largest() == (
        "gradients and activations 3.00 GiB (less by train.token_budget, models.policy.gradient_checkpointing); "
        "engines' caches 2.00 GiB (less by engine.kv.bytes, engine.kv.offload_bytes); "
        "weights 1.00 GiB (less by models.policy.dtype)"
    )


@pytest.mark.parametrize(
    ("stage", "copies", "caches"),
    [("sft", 1, 0), ("preference", 1, 0), ("eval", 1, 1), ("rl", 2, 1), ("distill", 2, 1)],
)
def test_a_stage_holds_what_it_works_with(stage: str, copies: int, caches: int) -> None:
    """A trainer and an engine have weights and packed ones each; what trains has moments and gradients; what publishes
    an update."""
    found, trains = held(stage), stage != "eval"
    page = POLICY.token_bytes("float32") * 16
    assert weights(found) == copies * both(POLICY) and found.cache == caches * 17 * page
    assert found.optimiser == trains * 2 * 4 * POLICY.parameters and bool(found.step) == trains
    assert found.update == (copies == 2) * (POLICY.weights + POLICY.packed)
    assert bool(found.sampling) == bool(caches)


def test_the_stage_that_holds_most_counts() -> None:
    """Models are closed when their stage ends; the C library keeps a share of what they had."""
    several, alone, before = held("sft", "rl", "eval"), held("rl"), held("sft")
    assert several._replace(earlier=0) == alone and alone.stage == "rl"
    assert several.earlier == int(EARLIER * (before.total - before.process))
    assert held("eval", "sft", "rl").earlier == several.earlier, "the most of those before"
    assert held("init").total == POLICY.weights + POLICY.tables


def test_gradients_are_there_once_added_up_beside_what_lanes_need() -> None:
    """Each is added when it is found; with one thread the lanes follow each other."""
    config, one = held_config(("sft",)), POLICY.micro_batch(16)
    assert held("sft").step == POLICY.weights + one, "16 tokens are not cut"
    wide = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, token_budget=512))
    lane = POLICY.micro_batch(256)
    assert whole(wide, {"policy": POLICY}).step == POLICY.weights + 2 * lane
    alone = msgspec.structs.replace(wide, run=msgspec.structs.replace(wide.run, threads=1))
    assert whole(alone, {"policy": POLICY}).step == POLICY.weights + lane


def test_a_stage_may_have_a_budget_of_its_own() -> None:
    asked = {"steps": 1, "train": {"token_budget": 512}}
    assert held("sft", sft=asked).step > held("sft").step == held("sft", sft={"steps": 1}).step


def test_a_reference_and_a_reward_model_are_there_too() -> None:
    """Each as weights and packed; in the stages that ask them alone."""
    assert weights(held(rl=COMPARED)) - weights(held()) == both(POLICY)
    assert held(rl={"preference": {"name": "simpo"}}) == held()
    judged = {"reward_model": "large"}
    assert weights(held(rl={**COMPARED, **judged}, others=OTHERS)) - weights(held(rl=COMPARED)) == both(LARGE)
    assert held("sft", rl=COMPARED) == held("sft")
    assert weights(held("eval", rl=judged, others=OTHERS)) - weights(held("eval")) == both(LARGE)


def test_teachers_are_there_with_an_engine_each_or_beside_the_trainer() -> None:
    taught = {
        "teachers": {"a": "large", "b": "large", "c": "small", "*": "policy"},
        "over": "top_k",
        "feedback": "sibling",
    }
    served = held("distill", distill=taught, others=OTHERS)
    assert weights(served) - weights(held("distill")) == both(LARGE) + both(SMALL)
    assert served.cache == sum(17 * 16 * one.token_bytes("float32") for one in (POLICY, LARGE, SMALL))
    whole = {"teachers": {"a": "large", "*": "small"}, "over": "vocabulary"}
    beside = held("distill", distill=whole, others=OTHERS)
    assert weights(beside) == weights(served) and beside.cache == held("distill").cache
    elsewhere = {"large": {"path": "x", "served": {"url": "http://a/v1"}}, "small": {"path": "y"}}
    found = held("distill", distill=taught, models=elsewhere, others=OTHERS)
    assert weights(found) - weights(held("distill")) == both(SMALL)


def test_judges_are_there_wherever_the_world_is_played() -> None:
    asked = {"kind": "judge", "model": "large", "prompt": "{completion}?", "choices": {"yes": 1.0}}
    rubric = {"kind_one": asked, "other": {**asked, "model": "large"}}
    models = {"teacher": {"path": "x"}, "large": {"path": "y"}}
    for stage in ("rl", "distill", "eval", "sft"):
        with_judge, without = (
            held(stage, rubric=rubric, models=models, others=OTHERS),
            held(stage, models=models, others=OTHERS),
        )
        assert weights(with_judge) - weights(without) == both(LARGE), stage
        assert with_judge.cache - without.cache == 17 * 16 * LARGE.token_bytes("float32")
    assert held("preference", rubric=rubric, others=OTHERS) == held("preference")


def test_who_is_collected_from_is_served_alone() -> None:
    found = held("collect", collect={"model": "large"}, models={"large": {"path": "x"}}, others=OTHERS)
    assert weights(found) == both(LARGE) and found.cache and not found.step


def test_a_moving_average_is_a_reference_of_its_own_numbers() -> None:
    """Of a float32 model they are the weights of the reference; of another, what is trained once more."""

    def of(measure: Any = held, **settings: Any) -> Any:
        kl = {"coefficient": 0.1, **{key: settings.pop(key) for key in ("reference", "estimator") if key in settings}}
        return measure(algo={"kl": kl}, policy=settings)

    start, average, last, count = of(), of(reference="average"), of(reference="last"), POLICY.parameters
    assert weights(start) - weights(held()) == both(POLICY)
    assert average.total == start.total and weights(last) == weights(held())
    assert of(saved) == of(saved, reference="last") == of(saved, reference="average") - 4 * count == 12 * count
    assert of(reference="last", estimator="full") == average
    narrow = of(reference="average", dtype="bfloat16")
    assert narrow.optimiser - of(dtype="bfloat16").optimiser == 4 * count
    factors = of(saved, lora={"rank": 4})
    assert 0 < 3 * of(saved, reference="average", lora={"rank": 4}) == 4 * factors < 12 * count


@pytest.mark.parametrize("section", ["critic", "implicit"])
@pytest.mark.parametrize("model", ["policy", "large"])
def test_what_learns_beside_the_policy_has_a_trainer_too(section: str, model: str) -> None:
    """It publishes nothing and nobody serves it."""
    asked, its = {"rl": {section: {"model": model}}, "others": OTHERS}, sized(LAYERS[model])
    beside, alone = held(**asked), held()
    assert saved(**asked) - saved() == 12 * its.parameters
    assert weights(beside) - weights(alone) == both(its)
    assert beside.optimiser - alone.optimiser == 8 * its.parameters
    assert beside.cache == alone.cache and beside.step + beside.update > alone.step + alone.update


def test_numbers_have_the_size_of_their_dtype() -> None:
    """Of a bfloat16 model masters and moments alone are float32."""
    narrow, wide = held(policy={"dtype": "bfloat16"}), held()
    assert 2 * narrow.weights == wide.weights and narrow.optimiser == 3 * 4 * POLICY.parameters
    assert narrow.packed <= wide.packed and 2 * narrow.cache == wide.cache


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_counts_once(tied: bool) -> None:
    init = msgspec.convert({**INIT, "num_layers": 1, "tie_embeddings": tied, "max_positions": 256}, InitConfig)
    assert outline(init).parameters == SMALL.parameters + (not tied) * 64 * 1024
    assert outline(init).packed == SMALL.packed, "the head is multiplied with in either case"


def test_of_a_model_below_adapters_only_these_are_trained() -> None:
    found, plain = held(policy={"lora": {"rank": 4}}), held()
    adapted = sized(3, lora=LoraConfig(rank=4))
    assert 0 < adapted.num_trained < POLICY.parameters / 4 and found.optimiser == 8 * adapted.num_trained
    assert weights(found) == 2 * both(adapted) > weights(plain)
    assert found.update < plain.update / 2 and found.step + found.update < plain.step + plain.update


def test_every_model_is_read_where_it_lies(tmp_path: Path) -> None:
    """Of those that the run's stages compute here; a model that nobody asks is not looked for."""
    tiny_model("qwen3", tmp_path)
    models = {name: {"path": str(tmp_path)} for name in ("judge", "teacher", "critic", "reward")}
    models["nobody"] = {"path": "/nowhere"}
    asked = {"kind": "judge", "model": "judge", "prompt": "{completion}?", "choices": {"yes": 1.0}}
    rl = {"critic": {"model": "critic"}, "reward_model": "reward"}
    config = held_config(
        ("rl", "distill"), models=models, rl=rl, rubric={"a": asked}, distill={"teachers": {"*": "teacher"}}
    )
    found = shapes_of(config, tmp_path)
    assert set(found) == {"policy", "judge", "teacher", "critic (scalar)", "reward (scalar)"}
    assert found["policy"].parameters == found["teacher"].parameters > found["critic (scalar)"].parameters - 64


def test_keys_and_values_here_and_in_host_memory() -> None:
    token = POLICY.token_bytes("float32")
    assert held(engine={"kv_tokens": 1600}).cache == 1616 * token
    assert held(engine={"kv_tokens": 0, "kv_bytes": GIB, "max_running": 2}).cache == (2 * 256 + 16) * token, (
        "no more than is used"
    )
    offload = {"kv_across_turns": "offload", "offload_bytes": 64 * 16 * token}
    assert held(engine=offload).cache == (17 + 64) * 16 * token
    assert held(engine={**offload, "kv_across_turns": "keep"}).cache == 17 * 16 * token
    assert max_context(POLICY, held_config(("rl",), engine={"kv_tokens": 64}).engine, "float32") == 64


def loaded(family: str, path: Path, **settings: Any) -> Any:
    return load(path, numerics="fast" if family in RECURRENT else "exact", **settings)


@pytest.fixture
def path_name(kernel_path: str) -> Iterator[str]:
    """Each path in turn; what was sized on another one is forgotten."""
    outline.cache_clear()
    yield kernel_path
    outline.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gemma3_text", "gpt_oss"])
def test_a_path_packs_as_much_as_it_says(path_name: str, family: str, dtype: str, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path)
    assert outline(path, dtype=dtype).packed == Outline(loaded(family, path, dtype=dtype)).packed


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_packed_factors_are_counted_as_large_as_they_are(path_name: str, family: str, tmp_path: Path) -> None:
    """Small ranks are padded."""
    base = tiny_model(family, tmp_path / "base")
    stacks = () if family == "qwen3" else ("experts.gate_up_proj", "experts.down_proj")
    lora = LoraConfig(rank=3, target_parameters=stacks)
    real = Outline(load(tiny_adapter(base, tmp_path / "adapter", rank=3, target_parameters=stacks)))
    said = outline(base, lora=lora)
    assert (said.staged, said.packed, said.weights) == (real.staged, real.packed, real.weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", *FEATURES])
def test_a_family_holds_what_is_counted(family: str, dtype: str, tmp_path: Path) -> None:
    """Parameters, what the products read, tables, and keys and values of a token. Mixtures of some families have a
    router that is not ours."""
    path = tiny_model(family, tmp_path)
    real = Outline(loaded(family, path, dtype=dtype))
    said = outline(path, dtype=dtype, numerics="fast" if family in RECURRENT else "exact")
    assert (said.parameters, said.kv_heads, said.tables) == (real.parameters, real.kv_heads, real.tables)
    assert real.weights <= 1.001 * said.weights <= 1.002 * real.weights
    assert real.packed <= said.packed <= 1.05 * real.packed
    assert said.token_bytes(dtype) == pages.token_bytes(real.kv_heads, real.model.dtype)


def kept_by_autograd(model: Any, tokens: int) -> int:
    """Return the bytes of the tensors other than weights that a forward pass saves for its backward pass."""
    known, saved = {one.untyped_storage().data_ptr() for one in model.state().values()}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.hidden(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), Packed.of([tokens]))
    del out
    return sum(size for storage, size in saved.items() if storage not in known)


@pytest.mark.parametrize("dtype", short_of(["float32", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize("family", ["llama", *FEATURES])
def test_a_family_keeps_what_its_formula_says(family: str, dtype: str, tmp_path: Path) -> None:
    """At these sizes; the chunks of a recurrent layer are larger than its heads, and keep twice as much."""
    path = tiny_model(family, tmp_path)
    real = loaded(family, path, dtype=dtype)
    kept = kept_by_autograd(real, 192) - kept_by_autograd(real, 64)
    model = outline(path, dtype=dtype, numerics="fast" if family in RECURRENT else "exact")
    said = model.kept(192) - model.kept(64)
    assert (0.45 if family in RECURRENT else 0.7) * kept <= said <= 1.6 * kept


def test_checkpointing_keeps_less(tmp_path: Path) -> None:
    plain, less = (sized(30, gradient_checkpointing=asked).micro_batch(512) for asked in (False, True))
    assert less < plain / 2


def test_what_a_config_leaves_out_the_library_knows(tmp_path: Path) -> None:
    """Published configs of Gemma 3 are without several of its sizes."""
    path = tiny_model("gemma3", tmp_path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for name in ("num_attention_heads", "head_dim", "vocab_size", "max_position_embeddings"):
        del config["text_config"][name]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = outline_of(path)
    assert (shape.kv_heads[0].head_dim, shape.vocab_size, shape.max_positions) == (256, 262_208, 131_072)
