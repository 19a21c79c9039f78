"""What every trainer keeps: the bits of one process, whatever computes them. A new kind of rank joins `KINDS`."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from common.tiny_adapters import tiny_adapter
from rank_threads import RankThread

from sparring.algo.config import AlgoConfig
from sparring.algo.kl import Kl
from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.loss.value import ValueLoss
from sparring.algo.rare.gate.kl_cov import KlCov
from sparring.cluster.config import ClusterConfig
from sparring.cluster.rank_process import RankProcess
from sparring.cluster.ranks import RankTrainer
from sparring.cluster.ray import LARGE, RayParts
from sparring.cluster.trainer import TrainerParts
from sparring.errors import BadInput, NotFinite, StoreError
from sparring.generation import ScoreRequest
from sparring.model.config import InitConfig, ModelConfig
from sparring.model.create import create
from sparring.protocols import Loss, Trainer, TrainPlan
from sparring.store.codec import encode
from sparring.testing.tiny_models import tiny_model
from sparring.train.checkpoint import MANIFEST, SHARD, SHARDS
from sparring.train.config import TrainConfig
from sparring.types import Batch, CheckpointRef, Sample
from sparring.weights.inline import fetch

Make = Callable[[TrainerParts], Trainer]
VOCABULARY = 200
START_S = 120.0


def threads(count: int) -> Make:
    return lambda parts: RankTrainer(parts, lambda number: [RankThread() for _ in range(number)], count, START_S)


def processes(count: int) -> Make:
    return lambda parts: RankTrainer(parts, lambda number: map(RankProcess, range(number)), count, START_S)


RAY: list[RayParts] = []
"""The Ray cluster of the tests that are marked so, while there are any."""


def on_ray(parts: TrainerParts) -> Trainer:
    folder = Path(parts.path)
    return RankTrainer(parts, RAY[0].ranks(1), 2, START_S, folder)


def in_shards(make: Make) -> Make:
    return lambda parts: make(replace(parts, sharded=True))


KINDS: dict[str, Make] = {
    "inline": lambda parts: parts.trainer(),
    "one": threads(1),
    "two": threads(2),
    "three": threads(3),
    "processes": processes(2),
    "ray": on_ray,
    "one in shards": in_shards(threads(1)),
    "two in shards": in_shards(threads(2)),
    "three in shards": in_shards(threads(3)),
    "processes in shards": in_shards(processes(2)),
}
FULL, ON_RAY = pytest.mark.full, pytest.mark.cluster


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two nodes with a processor each."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        config = ClusterConfig(kind="ray", address=nodes.address, ranks=2)
        RAY.append(RayParts(config, 0, 2, tmp_path_factory.mktemp("ray") / "ray.log"))
        yield
    finally:
        for parts in RAY:
            parts.close()
        nodes.shutdown()


@pytest.fixture(autouse=True)
def places_of_ranks(request: pytest.FixtureRequest) -> None:
    """Start a Ray cluster before the first test that needs one."""
    if request.node.get_closest_marker("cluster") is not None:
        request.getfixturevalue("ray_cluster")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding is cut: it has several blocks (`train.blocks`)."""
    init = InitConfig(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=96, max_positions=64
    )
    return create(init, VOCABULARY, tmp_path_factory.mktemp("model") / "qwen3", 7)


def row(draw: random.Random, name: str, **changes: Any) -> Sample:
    """A row of two turns, in name sampled by version 0."""
    lengths = [(0.0, draw.randint(1, 5)), (1.0, draw.randint(1, 8)), (0.0, 2), (1.0, draw.randint(1, 8))]
    weights = tuple(weight for weight, length in lengths for _ in range(length))
    advantage = draw.uniform(-1, 1)
    sample = Sample(
        id=name,
        group="g",
        source="policy",
        tokens=tuple(draw.randrange(VOCABULARY) for _ in weights),
        weights={"policy": weights},
        logprobs=tuple(draw.uniform(-6.0, -4.0) if weight else 0.0 for weight in weights),
        advantages=tuple(advantage if weight else 0.0 for weight in weights),
        versions=tuple(0 if weight else -1 for weight in weights),
        kv_versions=tuple(0 if weight else -1 for weight in weights),
    )
    return replace(sample, **changes)


def batch_of(rows: list[Sample], step: int = 1) -> Batch:
    sums: dict[str, float] = {}
    for sample in rows:
        for term, weights in sample.weights.items():
            sums[term] = sums.get(term, 0.0) + sum(weights)
    return Batch(step=step, model="policy", rows=tuple(rows), denominators=sums)


def batches(count: int = 3, rows: int = 20, **changes: Any) -> list[Batch]:
    """The last part of a step is computed by the first of two ranks, or by the last of three, while others wait."""
    draw = random.Random(5)
    return [batch_of([row(draw, f"{step}-{i}", **changes) for i in range(rows)], step) for step in range(1, count + 1)]


def parts_of(
    folder: Path, losses: list[Loss] | None = None, *, dtype: str = "float32", threads: int = 1, **plan: Any
) -> TrainerParts:
    """Parts of a trainer whose every step is clipped."""
    return TrainerParts(
        name="policy",
        path=str(folder),
        plan=TrainPlan(losses=losses or [PolicyLoss(AlgoConfig())], total_steps=9, overrides={}, **plan),
        models={"policy": ModelConfig(path=str(folder), dtype=dtype)},
        train=TrainConfig(learning_rate=1e-2, weight_decay=0.1, token_budget=90, gradient_clip=0.01),
        device="cpu",
        threads=threads,
    )


def use(trainer: Trainer, work: Callable[[Trainer], Awaitable[Any]]) -> Any:
    """`work(trainer)` on an event loop, and the trainer closed."""

    async def main() -> Any:
        try:
            return await work(trainer)
        finally:
            await trainer.close()  # type: ignore[attr-defined]

    return asyncio.run(main())


def without_times(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def beyond(sample: Sample) -> Sample:
    """A row with a token that the vocabulary does not have."""
    return replace(sample, tokens=(*sample.tokens[:-1], 10**6))


async def trained(trainer: Trainer, given: list[Batch], needs: frozenset[str] = frozenset({"logprob"})) -> list[Any]:
    """Everything that can be seen of a training: metrics, values of rows, and the published weights with their probe."""
    seen: list[Any] = []
    for batch in given:
        seen.append(without_times(await trainer.forward_backward(batch)))
        seen.append(without_times((await trainer.step()).metrics))
    seen.append(await trainer.forward(given[0].rows, needs))
    ref = await trainer.push()
    return [*seen, trainer.version, ref.checksum, ref.probe, ref.digests, sorted(fetch(ref))]


def check_bits(make: Make, parts: TrainerParts, given: list[Batch], **options: Any) -> list[Any]:
    """Check that a kind's training cannot be told from one process's; return what was seen."""
    expected = use(parts.trainer(), lambda trainer: trained(trainer, given, **options))
    assert use(make(parts), lambda trainer: trained(trainer, given, **options)) == expected
    assert expected[0]["micro_batches"] > 3 and expected[1]["updated"] == 1.0
    return expected


@pytest.mark.parametrize(
    ("kind", "dtype", "family"),
    [
        ("two", "float32", "qwen3"),
        pytest.param("two in shards", "float32", "qwen3", marks=FULL),
        pytest.param("three in shards", "bfloat16", "qwen3", marks=FULL),
        pytest.param("two in shards", "bfloat16", "qwen3_moe", marks=FULL),
        pytest.param("three in shards", "float32", "qwen3_moe", marks=FULL),
        pytest.param("processes in shards", "float32", "qwen3", marks=FULL),
        pytest.param("three", "bfloat16", "qwen3_moe", marks=FULL),
        pytest.param("three", "bfloat16", "qwen3", marks=FULL),
        pytest.param("two", "float32", "qwen3_moe", marks=FULL),
        pytest.param("processes", "float32", "qwen3", marks=FULL),
        pytest.param("processes", "bfloat16", "qwen3_moe", marks=FULL),
        pytest.param("ray", "float32", "qwen3", marks=ON_RAY),
        pytest.param("ray", "bfloat16", "qwen3_moe", marks=ON_RAY),
    ],
)
def test_the_layout_does_not_change_the_bits(kind: str, dtype: str, family: str, qwen3: Path, tmp_path: Path) -> None:
    folder = qwen3 if family == "qwen3" else tiny_model(family, tmp_path / "model", seed=1, vocab_size=VOCABULARY)
    seen = check_bits(KINDS[kind], parts_of(folder, dtype=dtype), batches())
    assert seen[1]["grad_norm"] > 0.01, "else nothing is clipped"


@FULL
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next"])
def test_families_that_transformers_computes_keep_their_bits(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path / "model", seed=1, vocab_size=VOCABULARY)
    parts = parts_of(folder)
    if family == "qwen3_next":  # recurrent: fast numerics alone
        parts = replace(parts, models={"policy": ModelConfig(path=str(folder), numerics="fast")})
    check_bits(KINDS["three"], parts, batches())


@FULL
def test_threads_of_ranks_do_not_change_the_bits(qwen3: Path) -> None:
    one, two = (
        use(KINDS["two"](parts_of(qwen3, threads=threads)), lambda t: trained(t, batches())) for threads in (1, 2)
    )
    assert one == two


@FULL
@pytest.mark.parametrize("kind", ["one", "one in shards"])
def test_one_rank_is_the_plain_trainer(kind: str, qwen3: Path) -> None:
    check_bits(KINDS[kind], parts_of(qwen3), batches())


@FULL
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (KINDS["three"], "bfloat16"),
        pytest.param(KINDS["two"], "float32", marks=FULL),
        pytest.param(KINDS["ray"], "float32", marks=ON_RAY),
    ],
)
def test_adapters_keep_their_bits(make: Make, dtype: str, qwen3: Path, tmp_path: Path) -> None:
    """Of an adapter that is smaller than a block, most ranks have little or nothing."""
    check_bits(make, parts_of(tiny_adapter(qwen3, tmp_path / "adapter", seed=1), dtype=dtype), batches())


@FULL
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (KINDS["two"], "bfloat16"),
        pytest.param(KINDS["three"], "float32", marks=FULL),
        pytest.param(KINDS["ray"], "float32", marks=ON_RAY),
    ],
)
def test_teachers_and_averages_keep_their_bits(make: Make, dtype: str, qwen3: Path) -> None:
    """Half of the rows have the average as their teacher, half the model as it was."""
    loss = PolicyLoss(AlgoConfig(kl=Kl(coefficient=0.3, estimator="full", reference="average")))
    plan = {"teachers": {"average": None, "first": None}, "averages": {"average": 0.7}}
    given = [
        replace(each, rows=tuple(replace(row, teacher=("average", "first")[i % 2]) for i, row in enumerate(each.rows)))
        for each in batches()
    ]
    seen = check_bits(make, parts_of(qwen3, [loss], dtype=dtype, **plan), given, needs=frozenset({"teacher"}))
    assert any(value for values in seen[-6] for value in values["teacher"])


def test_any_rank_answers_for_a_teacher(qwen3: Path) -> None:
    asked = [ScoreRequest(id="s", tokens=(3, 1, 4, 1, 5, 9), first=2, top_k=k) for k in (0, 2, 2)]
    parts = parts_of(qwen3, teachers={"first": None})

    async def scores(trainer: Trainer) -> list[Any]:
        return [await trainer.score("first", request) for request in asked]

    assert use(parts.trainer(), scores) == use(KINDS["two"](parts), scores)


@FULL
@pytest.mark.parametrize(
    "make",
    [
        KINDS["two"],
        *(pytest.param(KINDS[kind], marks=FULL) for kind in ("three", "three in shards")),
        pytest.param(KINDS["ray"], marks=ON_RAY),
    ],
)
def test_surveys_keep_their_bits(make: Make, qwen3: Path) -> None:
    """The loss sees all tokens of a step first, whose values the ranks compute between them."""
    check_bits(make, parts_of(qwen3, [PolicyLoss(AlgoConfig(gate=KlCov(share=0.2)))]), batches())


@ON_RAY
def test_two_trainers_on_ray_do_not_take_each_others_rows(qwen3: Path) -> None:
    """What is large is given to Ray once, under a number."""
    draw = random.Random(6)
    rows = [[row(draw, f"{trainer}-{number}") for number in range(800)] for trainer in range(2)]
    parts = parts_of(qwen3)

    async def values(trainer: Trainer, other: Trainer | None = None) -> list[Any]:
        found = await asyncio.gather(
            *(each.forward(of) for each, of in zip((trainer, other or trainer), rows, strict=True))
        )
        return [list(each) for each in found]

    first, second = (RankTrainer(parts, RAY[0].ranks(1), 1, START_S, qwen3) for _ in range(2))
    together = use(first, lambda trainer: values(trainer, second))
    asyncio.run(second.close())
    assert together == use(parts.trainer(), values)
    assert len(encode(rows[0])) > LARGE


@FULL
@pytest.mark.parametrize("kind", ["three", "two in shards"])
def test_critics_keep_their_bits(kind: str, qwen3: Path) -> None:
    given = []
    for each in batches():
        rows = [
            replace(
                row,
                weights={"value": row.weights["policy"]},
                annotations={"value": (0.0,) * len(row.tokens), "return": row.advantages or ()},
            )
            for row in each.rows
        ]
        given.append(batch_of(rows, each.step))
    parts = parts_of(qwen3, [ValueLoss()], head="new scalar")
    check_bits(KINDS[kind], parts, given, needs=frozenset({"value"}))


@FULL
@pytest.mark.parametrize("kind", ["three", "three in shards"])
def test_steps_within_an_update_and_parts_without_tokens_keep_their_bits(kind: str, qwen3: Path) -> None:
    """Every second row has nothing to train; the first step has no row that has."""
    losses: list[Loss] = [PolicyLoss(AlgoConfig()), ImitateLoss()]
    idle = [replace(each, rows=tuple(_idle(row) for row in each.rows)) for each in batches(1)]
    some = [
        replace(each, rows=tuple(_idle(row) if i % 2 else row for i, row in enumerate(each.rows))) for each in batches()
    ]

    async def steps(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for number, batch in enumerate([*idle, *some]):
            seen.append(without_times(await trainer.forward_backward(batch)))
            result = await trainer.step(ends_update=number % 2 == 1)
            seen.append((result.version, without_times(result.metrics)))
        return [*seen, (await trainer.push()).checksum]

    expected = use(parts_of(qwen3, losses).trainer(), steps)
    assert expected[1][1]["updated"] == 0.0
    assert use(KINDS[kind](parts_of(qwen3, losses)), steps) == expected


def _idle(sample: Sample) -> Sample:
    return replace(sample, advantages=(0.0,) * len(sample.tokens))


@pytest.mark.parametrize(
    "kind",
    [
        "inline",
        "two",
        *(pytest.param(kind, marks=FULL) for kind in ("three", "two in shards", "three in shards")),
        pytest.param("ray", marks=ON_RAY),
    ],
)
def test_a_row_that_cannot_be_computed_is_refused_and_training_goes_on(kind: str, qwen3: Path) -> None:
    """It is in the part of one rank; the others do not wait for it, and no gradient is left, nor of the batch before."""
    given, parts = batches(), parts_of(qwen3)
    bad = replace(given[0], rows=tuple(beyond(row) if i == 3 else row for i, row in enumerate(given[0].rows)))

    async def work(trainer: Trainer) -> list[Any]:
        await trainer.forward_backward(given[2])
        with pytest.raises(BadInput, match="1000000"):
            await trainer.forward_backward(bad)
        return [await empty(trainer), *await trained(trainer, given)]

    async def empty(trainer: Trainer) -> Any:
        return without_times((await trainer.step(ends_update=False)).metrics)

    async def good(trainer: Trainer) -> list[Any]:
        return [await empty(trainer), *await trained(trainer, given)]

    assert use(KINDS[kind](parts), work) == use(parts.trainer(), good)


@pytest.mark.parametrize(
    "kind",
    [
        "inline",
        *(pytest.param(kind, marks=FULL) for kind in ("two", "two in shards")),
        pytest.param("ray", marks=ON_RAY),
    ],
)
def test_gradients_that_are_not_finite_end_every_kind_alike(kind: str, qwen3: Path) -> None:
    endless = [replace(each, rows=tuple(_endless(row) for row in each.rows)) for each in batches()]

    async def work(trainer: Trainer) -> None:
        for batch in endless[:2]:
            await trainer.forward_backward(batch)
            result = await trainer.step()
            assert result.metrics["updated"] == 0.0 and result.metrics["tokens_dropped"] > 0
        await trainer.forward_backward(endless[2])
        with pytest.raises(NotFinite, match="in 3 optimiser steps"):
            await trainer.step()

    use(KINDS[kind](parts_of(qwen3)), work)


def _endless(sample: Sample) -> Sample:
    return replace(sample, advantages=tuple(value and float("inf") for value in sample.advantages or ()))


async def _saved(trainer: Trainer, given: list[Batch], folder: Path) -> CheckpointRef:
    for batch in given:
        await trainer.forward_backward(batch)
        await trainer.step()
    return await trainer.save(str(folder), stage="rl", metrics={"reward": 0.5})


async def _restored(trainer: Trainer, ref: CheckpointRef, given: list[Batch]) -> list[Any]:
    await trainer.restore(ref)
    assert trainer.version == ref.step
    return await trained(trainer, given)


WRITERS = ("inline", "two", "three", "two in shards")


@FULL
@pytest.mark.parametrize("form", ["float32", "bfloat16", "adapter", "average"])
def test_any_kind_goes_on_from_a_checkpoint_of_any_other(form: str, qwen3: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(qwen3, tmp_path / "adapter", seed=1) if form == "adapter" else qwen3
    plan = {"teachers": {"average": None}, "averages": {"average": 0.7}} if form == "average" else {}
    loss = PolicyLoss(AlgoConfig(kl=Kl(coefficient=0.3, estimator="full", reference="average")))
    dtype = "float32" if form in ("float32", "adapter") else "bfloat16"
    parts = parts_of(folder, [loss] if plan else None, dtype=dtype, **plan)
    given = batches(5, teacher="average") if plan else batches(5)
    kinds = WRITERS if form in ("float32", "bfloat16") else [kind for kind in WRITERS if "shards" not in kind]
    saved = {kind: use(KINDS[kind](parts), partial(_saved, given=given[:2], folder=tmp_path / kind)) for kind in kinds}
    assert (tmp_path / "three" / SHARD.format(3, 3)).is_file() and not list(tmp_path.glob("*.tmp"))
    assert len({(ref.step, ref.stage, ref.metrics["reward"]) for ref in saved.values()}) == 1
    found = [
        use(KINDS[kind](parts), partial(_restored, ref=ref, given=given[2:]))
        for kind in kinds
        for ref in saved.values()
    ]
    assert all(each == found[0] for each in found)


@FULL
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("two", "three"),
        pytest.param("three", "inline", marks=FULL),
        pytest.param("inline", "two", marks=FULL),
        pytest.param("three", "ray", marks=ON_RAY),
        pytest.param("ray", "inline", marks=ON_RAY),
        pytest.param("inline", "two in shards", marks=FULL),
        pytest.param("two in shards", "three in shards", marks=FULL),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(before: str, after: str, qwen3: Path, tmp_path: Path) -> None:
    given, parts = batches(3), parts_of(qwen3, dtype="bfloat16")
    ref = use(KINDS[before](parts), partial(_saved, given=given[:2], folder=tmp_path / "step"))
    whole = use(parts.trainer(), partial(trained, given=given))
    later = use(KINDS[after](parts), partial(_restored, ref=ref, given=given[2:]))
    assert (later[:2], later[3:]) == (whole[4:6], whole[7:]), "all but the values of rows, which are other rows"


@pytest.fixture(scope="session")
def two_steps(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of two ranks after one step and after two, `step` and `later`."""
    folder, given = tmp_path_factory.mktemp("steps"), batches()

    async def saved(trainer: Trainer) -> None:
        await _saved(trainer, given[:1], folder / "step")
        await _saved(trainer, given[1:2], folder / "later")

    use(KINDS["two"](parts_of(qwen3)), saved)
    return folder


def _cut(folder: Path) -> None:
    shard = folder / SHARD.format(1, 2)
    shard.write_bytes(shard.read_bytes()[:-9])


def _miss(folder: Path) -> None:
    (folder / SHARD.format(2, 2)).unlink()


def _flip(folder: Path) -> None:
    """A bit in a moment: nothing but its checksum tells."""
    shard = folder / SHARD.format(2, 2)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def _take_of_another_step(folder: Path) -> None:
    shutil.copyfile(folder.with_name("later") / SHARD.format(2, 2), folder / SHARD.format(2, 2))


def _forget(folder: Path) -> None:
    """A manifest that does not name a shard at all."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["checksums"][SHARD.format(2, 2)], manifest[SHARDS][SHARD.format(2, 2)]
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "harm", [_flip, *(pytest.param(harm, marks=FULL) for harm in (_cut, _miss, _take_of_another_step, _forget))]
)
@pytest.mark.parametrize(
    "kind",
    [
        "two",
        *(pytest.param(kind, marks=FULL) for kind in ("inline", "two in shards")),
        pytest.param("ray", marks=ON_RAY),
    ],
)
def test_a_checkpoint_with_a_damaged_shard_is_refused(
    harm: Callable[[Path], None], kind: str, qwen3: Path, two_steps: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    harm(tmp_path / "step")

    async def restored(trainer: Trainer) -> None:
        with pytest.raises(StoreError, match="run.damaged=pass_over"):
            await trainer.restore(CheckpointRef(model="policy", stage="rl", step=1, path=str(tmp_path / "step")))

    use(KINDS[kind](parts_of(qwen3)), restored)


def test_a_checkpoint_of_other_settings_or_another_dtype_is_refused_by_all_ranks(qwen3: Path, tmp_path: Path) -> None:
    parts = parts_of(qwen3)
    ref = use(KINDS["two"](parts), partial(_saved, given=batches(1), folder=tmp_path / "step"))

    async def refused(trainer: Trainer, where: str) -> None:
        with pytest.raises(BadInput) as error:
            await trainer.restore(ref)
        assert where in error.value.where

    other = replace(parts, train=TrainConfig(learning_rate=1e-3, token_budget=90))
    use(KINDS["two"](other), partial(refused, where="checkpoint"))
    use(KINDS["two"](parts_of(qwen3, dtype="bfloat16")), partial(refused, where="optimiser state"))
