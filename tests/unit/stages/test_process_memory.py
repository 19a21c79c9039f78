"""What `sparring check` says each process of a run holds: what has a process of its own counts there and not in the
run's."""

import re
from typing import Any

import msgspec
import pytest
from test_memory import OTHERS, POLICY, held_config, sized
from test_memory import whole as whole_of

from sparring.errors import BadInput
from sparring.model.config import LoraConfig
from sparring.recipe.run_config import RunConfig
from sparring.stages.preflight.memory import ENGINES, RUN, MemoryEstimate, Processes, RunMemory, smaller_layout

SHAPES = {"policy": POLICY, **{name: sized(1) for name in OTHERS}}
WHOLE = POLICY.weights
GIB = 1 << 30
TRAINER, CRITIC = "trainer rank", "critic rank"


def laid_out(**cluster: Any) -> RunConfig:
    settings = {key: cluster.pop(key) for key in ("stages", "urls", "rl", "policy") if key in cluster}
    config = held_config(settings.pop("stages", ("rl",)), rl=settings.get("rl"), policy=settings.get("policy"))
    changed = msgspec.structs.replace(config.cluster, **cluster)
    engine = (
        msgspec.structs.replace(config.engine, kind="remote", urls=settings["urls"]) if "urls" in settings else None
    )
    return msgspec.structs.replace(config, cluster=changed, engine=engine or config.engine)


def of(**cluster: Any) -> dict[str, Processes]:
    (stage,) = RunMemory.of(laid_out(**cluster), SHAPES).stages
    return {one.kind: one for one in stage}


def whole() -> MemoryEstimate:
    return whole_of(laid_out(), SHAPES)


def test_a_run_without_processes_holds_everything() -> None:
    found = RunMemory.of(laid_out(), SHAPES)
    assert [one.each for one in found.largest] == [whole()] and found.total == whole().total


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_an_engine_process_has_the_engine(kind: str) -> None:
    """With a copy of the weights, its cache, and an update as large as the whole model."""
    found = of(kind=kind, engines=2)
    run, engine = found[RUN].each, found[ENGINES]
    assert (run.cache, run.sampling, run.optimiser) == (0, 0, whole().optimiser)
    assert (engine.number, engine.here) == (2, kind == "local")
    one = engine.each
    assert (one.cache, one.sampling, one.optimiser, one.step) == (whole().cache, whole().sampling, 0, 0)
    assert run.weights + one.weights == whole().weights and run.packed + one.packed == whole().packed
    assert one.update == WHOLE + POLICY.packed
    here = RunMemory.of(laid_out(kind=kind, engines=2), SHAPES).total
    assert one.beside == WHOLE and here == run.total + engine.here * 2 * one.total


def test_an_engine_elsewhere_takes_no_memory_of_the_run() -> None:
    (run,) = of(urls=("http://a:1", "http://b:2")).values()
    assert (run.each.cache, run.each.sampling) == (0, 0)
    assert run.each.weights == whole().weights - WHOLE - POLICY.tables


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_have_a_share_of_the_optimiser_and_all_weights(dtype: str) -> None:
    """The run's process trains nothing."""
    shapes = {"policy": sized(3, dtype=dtype)}

    def ranked(ranks: int) -> dict[str, Processes]:
        (stage,) = RunMemory.of(laid_out(kind="local", ranks=ranks, policy={"dtype": dtype}), shapes).stages
        return {one.kind: one for one in stage}

    own = ranked(1)[RUN].each
    for ranks in (2, 3):
        found = ranked(ranks)
        run, rank = found[RUN].each, found[TRAINER]
        assert (run.optimiser, run.step) == (0, 0) and rank.number == ranks
        assert rank.each.weights == shapes["policy"].weights + shapes["policy"].tables
        assert 1 <= rank.each.optimiser * ranks / own.optimiser <= 1.001
        assert rank.each.beside == shapes["policy"].weights


def test_a_critic_has_ranks_of_its_own() -> None:
    found = of(kind="local", ranks=2, rl={"critic": {"model": "policy"}})
    assert {kind: one.number for kind, one in found.items()} == {RUN: 1, TRAINER: 2, CRITIC: 2, ENGINES: 1}
    assert found[CRITIC].each.optimiser == found[TRAINER].each.optimiser and not found[CRITIC].each.beside


def test_a_reference_is_where_it_is_computed_and_a_reward_model_in_the_run() -> None:
    plain = of(kind="local", ranks=2)
    both = POLICY.weights + POLICY.packed + POLICY.tables
    asked = of(kind="local", ranks=2, rl={"preference": {"name": "dpo"}})
    assert asked[TRAINER].each.weights + asked[TRAINER].each.packed == both * 2
    assert asked[RUN] == plain[RUN]
    judged = of(kind="local", ranks=2, rl={"reward_model": "large"})
    assert judged[TRAINER] == plain[TRAINER] and judged[RUN].each.weights > plain[RUN].each.weights


def test_a_rank_keeps_the_gradients_of_its_part() -> None:
    taken, kept = (POLICY.micro_batch(64, keeps_gradients=asked) for asked in (False, True))
    assert taken < kept <= taken + WHOLE


def test_the_smallest_change_that_fits_is_found() -> None:
    """Fewer engines or ranks, else all in one process; more ranks never need less of one machine."""

    def total(**cluster: Any) -> int:
        return RunMemory.of(laid_out(kind="local", **cluster), SHAPES).total

    assert total(ranks=1) < total(ranks=2) < total(ranks=3)
    for had, fits, change in (
        ({"engines": 3}, {"engines": 2}, "cluster.engines = 2"),
        ({"ranks": 3}, {"ranks": 2}, "cluster.ranks = 2"),
        ({"ranks": 3}, {}, "cluster.ranks = 1"),
    ):
        found = smaller_layout(laid_out(kind="local", **had), SHAPES, total(**fits))
        assert found is not None and (found[0], found[1].total) == (change, total(**fits))
    found = smaller_layout(laid_out(kind="local", engines=2, ranks=2), SHAPES, total() - 1)
    assert found is not None and found[0].startswith('cluster.kind = "inline"') and found[1].total == whole().total
    assert smaller_layout(laid_out(kind="local", engines=2), SHAPES, whole().total - 1) is None
    assert smaller_layout(laid_out(), SHAPES, 0) is None


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_taking_turns_is_the_smallest_change_of_a_synchronous_run(kind: str) -> None:
    found = smaller_layout(at_once := laid_out(kind=kind), SHAPES, RunMemory.of(at_once, SHAPES).total - 1)
    assert found is not None and found[0] == "cluster.colocate = true"
    assert found[1].total == RunMemory.of(laid_out(kind=kind, colocate=True), SHAPES).total


def test_with_turns_the_engine_has_nothing_while_the_trainer_computes() -> None:
    trainers, engine = RunMemory.of(laid_out(colocate=True), SHAPES).stages
    [training], [sampling] = trainers, engine
    each, other = training.each, sampling.each
    assert (each.cache, each.sampling, each.update) == (0, 0, 0) and each.step >= whole().step
    assert (other.cache, other.sampling, other.update) == (whole().cache, whole().sampling, 0)
    assert other.weights == whole().weights and each.weights + WHOLE + POLICY.tables == whole().weights
    assert other.step == WHOLE, "what the trainer published; it has no gradients"
    assert each.optimiser == other.optimiser == whole().optimiser, "which stays"
    assert RunMemory.of(laid_out(colocate=True), SHAPES).total == max(each.total, other.total) < whole().total


def test_with_turns_an_engine_process_has_nothing_while_the_trainer_computes() -> None:
    of_trainer, of_engine = RunMemory.of(laid_out(kind="local", colocate=True), SHAPES).stages
    asleep, awake = (next(one for one in stage if one.kind == ENGINES).each for stage in (of_trainer, of_engine))
    assert asleep.total == 0 and awake == of(kind="local")[ENGINES].each
    at_once = RunMemory.of(laid_out(kind="local"), SHAPES).total
    assert RunMemory.of(laid_out(kind="local", colocate=True), SHAPES).total < at_once


def test_a_run_is_described_by_its_processes() -> None:
    found = RunMemory.of(laid_out(kind="local", ranks=2, engines=3, stages=("sft", "rl")), SHAPES)
    words = ", ".join(one.in_words() for one in found.peaks())
    expected = "# GiB in the run's process, # GiB in each of 2 trainer ranks, # GiB in each of 3 engine processes"
    assert re.sub(r"\d\.\d\d", "#", words) == expected
    assert found.in_words().startswith("0.0 GiB in stage rl (0.00 GiB in the run's process, ")
    assert {one.kind for one in found.stages[0]} == {RUN, TRAINER}, "engines start with the first stage that samples"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_with_parameters_in_shards_have_a_share_of_all_and_one_layer(dtype: str) -> None:
    """Of the optimiser's masters there is no copy; the embedding with the head is the largest stage of this model."""
    shapes = {"policy": sized(12, dtype=dtype)}
    model = shapes["policy"]

    def rank(ranks: int, shard: str) -> MemoryEstimate:
        config = laid_out(kind="local", ranks=ranks, shard=shard, policy={"dtype": dtype})
        (stage,) = RunMemory.of(config, shapes).stages
        return next(one.each for one in stage if one.kind == TRAINER)

    width = 4 if dtype == "float32" else 2
    stage = max(1024 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * width
    for ranks in (2, 3):
        found, whole = rank(ranks, "parameters"), rank(ranks, "optimiser")
        assert stage <= found.weights - model.tables <= 1.1 * stage < whole.weights / 2
        assert found.packed < whole.packed / 2 and found.step <= whole.step
        assert 12 * model.parameters / ranks <= found.optimiser <= 1.1 * 12 * model.parameters / ranks


@pytest.mark.full
def test_parameters_in_shards_are_named_where_nothing_else_fits() -> None:
    """With few tokens a step needs little but the model."""
    shapes = {"policy": sized(40)}

    def few_tokens(**cluster: Any) -> RunConfig:
        config = laid_out(stages=("sft",), **cluster)
        return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, token_budget=4))

    def total(**cluster: Any) -> int:
        return RunMemory.of(few_tokens(**cluster), shapes).total

    sharded = total(kind="local", ranks=2, shard="parameters")
    assert sharded < total() < total(kind="local", ranks=2)
    for had, change in (
        ({}, 'cluster.kind = "local" and cluster.ranks = 2 and cluster.shard = "parameters"'),
        ({"kind": "local", "ranks": 2}, 'cluster.shard = "parameters"'),
    ):
        found = smaller_layout(few_tokens(**had), shapes, sharded)
        assert found is not None and (found[0], found[1].total) == (change, sharded)
    assert smaller_layout(few_tokens(), shapes, sharded - 1) is None


def test_what_cannot_be_held_in_shards_is_refused_before_work_starts() -> None:
    lora = msgspec.convert({"rank": 2}, LoraConfig)
    averaging = held_config(("rl",), algo={"kl": {"coefficient": 0.1, "reference": "average"}})
    cases = [
        (averaging, SHAPES, "moving average"),
        (laid_out(), {"policy": sized(3, lora=lora)}, "an adapter"),
    ]
    for config, shapes, noun in cases:
        cluster = msgspec.structs.replace(config.cluster, kind="local", ranks=2, shard="parameters")
        with pytest.raises(BadInput, match=f"{noun}.*optimiser") as error:
            RunMemory.of(msgspec.structs.replace(config, cluster=cluster), shapes)
        assert error.value.where == "cluster.shard"
