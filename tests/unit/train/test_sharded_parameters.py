"""Parameters in shards: what a rank holds at any moment, and what it does when its work fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from rank_threads import LOADING
from ranks import in_ranks

from sparring.errors import BadInput, OtherRankFailed
from sparring.kernels import ops
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.decoder import Gatherer, Stream
from sparring.model.head import token_quantities
from sparring.model.layers import Product
from sparring.model.load import DTYPES, load
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig
from sparring.train.gloo import GlooRanks
from sparring.train.measure import Measures
from sparring.train.optimiser import Optimiser
from sparring.train.parts import Part
from sparring.train.sharded_parameters import stages_of
from sparring.train.sharded_weights import ShardedWeights

TOKENS = [[1, 5, 9, 2, 8], [3, 3, 7], [6, 4, 1, 0, 2, 5], [9], [8, 1, 2]]
"""Texts of five parts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers, each larger than the embedding."""
    init = InitConfig(
        hidden_size=64, num_layers=8, num_heads=2, num_kv_heads=2, head_dim=32, intermediate_size=192, max_positions=32
    )
    return create(init, 64, tmp_path_factory.mktemp("model") / "model", 3)


def sharded(folder: Path, ranks: GlooRanks, **settings: Any) -> tuple[CausalModel, Optimiser, ShardedWeights]:
    with LOADING:
        model = load(folder, **settings)
    trained = {name: p for name, p in model.parameters().items() if isinstance(p, torch.nn.Parameter)}
    optimiser = Optimiser(trained, TrainConfig(), ranks, apart=True)
    return model, optimiser, ShardedWeights(model, optimiser, ranks)


def loss_of(model: CausalModel, text: list[int]) -> torch.Tensor:
    tokens = torch.tensor(text)
    hidden = model.hidden(tokens, torch.arange(len(text)), Packed.of([len(text)]))
    targets, heat = tokens.roll(1), torch.ones(len(text))
    return token_quantities(model, hidden, targets, heat, frozenset({"logprob"}))["logprob"].sum()


def part_of(model: CausalModel, rows: Any) -> Part:
    return Part(loss_of(model, TOKENS[int(rows[0])]), lambda: Measures(0).plain())


class Watching:
    """Gatherer that notes what its model holds whenever a stage has been brought. Implements `Gatherer`."""

    def __init__(self, model: CausalModel, inner: Gatherer) -> None:
        self._model, self._inner = model, inner
        self.held = list[tuple[int, int]]()

    def enter(self, stage: int) -> None:
        self._inner.enter(stage)
        self.held.append(held(self._model))

    def entered(self, stage: int, stream: Stream) -> Stream:
        stream = self._inner.entered(stage, stream)
        self.held.append(held(self._model))
        return self._watched(stream)

    def left(self, stage: int, stream: Stream) -> Stream:
        return self._watched(self._inner.left(stage, stream))

    def _watched(self, stream: Stream) -> Stream:
        if stream[0].requires_grad:
            stream[0].register_hook(lambda gradient: self.held.append(held(self._model)))
        return stream


def held(model: CausalModel) -> tuple[int, int]:
    """Bytes of memory that the parameters of a model have, and that their packed copies have."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters().values()}
    products = [part if isinstance(part, Product) else getattr(part, "_product", None) for part in model.parts]
    packed = sum(product.packed.storage.nbytes for product in products if product is not None)
    return sum(storages.values()), packed


@pytest.mark.parametrize(("count", "dtype"), [(2, "float32"), pytest.param(3, "bfloat16", marks=pytest.mark.full)])
def test_a_rank_holds_its_share_of_the_parameters_and_one_layer(count: int, dtype: str, folder: Path) -> None:
    """At each stage, forward and backward. In bfloat16 the share is the float32 masters, which the optimiser has
    anyway, and there are no others."""

    def work(ranks: GlooRanks) -> tuple[int, int, int, list[tuple[int, int]]]:
        model, optimiser, weights = sharded(folder, ranks, dtype=dtype)
        assert model.decoder is not None
        watching = model.decoder.gatherer = Watching(model, model.decoder.gatherer)
        assert len(list(weights.parts.run([[["0"], ["1"], ["2"]]], lambda rows: part_of(model, rows)))) == 3
        share = sum(master.numel() for master in optimiser.own.values())
        layer = sum(p.nbytes for name, p in model.parameters().items() if ".layers.0." in name)
        whole = sum(p.numel() for p in model.parameters().values())
        return share, layer, whole, watching.held

    found = in_ranks(count, work)
    assert sum(share for share, *_ in found) == found[0][2]
    plain = torch.empty(64, 64, dtype=DTYPES[dtype])
    as_packed = ops.pack(plain).storage.nbytes / plain.nbytes  # a path may pack a float32 as three bfloat16
    for share, layer, whole, moments in found:
        assert share <= whole * (1 / count + 0.05)
        assert moments and max(parameters for parameters, _ in moments) <= layer * 1.01
        assert max(packed for _, packed in moments) <= as_packed * layer * 1.01


@pytest.mark.full
def test_layers_that_are_computed_again_keep_their_gradients(folder: Path) -> None:
    """With gradient checkpointing a layer's products are packed for the backward pass too."""
    model = load(folder)
    alone = Optimiser({n: p for n, p in model.parameters().items() if isinstance(p, torch.nn.Parameter)}, TrainConfig())
    for text in TOKENS:
        alone.add(torch.autograd.grad(loss_of(model, text), alone.parameters))
    norm, expected = alone.step(1e-2), alone.state()

    def work(ranks: GlooRanks) -> None:
        own, optimiser, weights = sharded(folder, ranks, gradient_checkpointing=True)
        list(weights.parts.run([[[str(n)] for n in range(len(TOKENS))]], lambda rows: part_of(own, rows)))
        assert optimiser.step(1e-2) == norm
        moments = optimiser.state()
        for name, (begin, end) in optimiser.ranges.items():
            gradient, whole = moments[f"exp_avg/{name}"], expected[f"exp_avg/{name}"]
            assert torch.equal(gradient.reshape(-1), whole.reshape(-1)[begin:end]), name

    in_ranks(2, work)


@pytest.mark.parametrize(
    "moment", ["backward", *(pytest.param(moment, marks=pytest.mark.full) for moment in ("before", "forward", "after"))]
)
def test_a_rank_whose_work_fails_takes_part_to_the_end(moment: str, folder: Path) -> None:
    """The other rank computes its part meanwhile, learns of the failure, and both go on."""

    def work(ranks: GlooRanks) -> int:
        model, optimiser, weights = sharded(folder, ranks)

        def compute(rows: Any) -> Part:
            if rows != ["1"]:
                return part_of(model, rows)
            if moment == "before":
                raise ZeroDivisionError
            if moment == "forward":
                loss_of(model, [1, 10**6])
            part = part_of(model, rows)
            if moment == "after":
                return Part(part.loss, lambda: Measures(1 // 0).plain())
            part.loss.register_hook(lambda gradient: gradient / (1 // 0))
            return part

        with pytest.raises(OtherRankFailed if ranks.rank == 0 else (ZeroDivisionError, IndexError)):
            list(weights.parts.run([[["0"], ["1"]]], compute))
        assert optimiser.step(0.0) == 0.0, "no gradient is left"
        return len(list(weights.parts.run([[["0"], ["2"]]], compute)))

    assert in_ranks(2, work) == [2, 2]


def test_every_weight_can_be_read_and_reading_to_the_end_after_an_error_keeps_the_ranks_in_step(folder: Path) -> None:
    state = {name: tensor.clone() for name, tensor in load(folder).state().items()}

    def work(ranks: GlooRanks) -> bool:
        _, _, weights = sharded(folder, ranks)
        found = {name: tensor.clone() for name, tensor in weights.tensors()}
        return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)

    assert in_ranks(3, work) == [True] * 3


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_other_families_and_adapters_are_refused_by_name(family: str, folder: Path, tmp_path: Path) -> None:
    other = load(tiny_model(family, tmp_path / family, seed=1))
    with pytest.raises(BadInput, match=f"got {family}.*optimiser") as error:
        stages_of(other, {})
    assert error.value.where == "cluster.shard"
    with pytest.raises(BadInput, match="got an adapter.*optimiser"):
        stages_of(load(tiny_adapter(folder, tmp_path / "adapter", seed=1)), {})


FAMILIES = [
    *("llama", "mistral", "qwen2"),
    *(pytest.param(family, marks=pytest.mark.full) for family in ("qwen3", "mixtral", "qwen3_moe")),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_parameter_of_the_family_belongs_to_a_stage(family: str, tmp_path: Path) -> None:
    model = load(tiny_model(family, tmp_path / family, seed=1))
    parameters = {id(p): name for name, p in model.parameters().items()}
    stages = stages_of(model, parameters)
    assert len(stages) == len(list(model.module.base_model.layers)) + 2
    assert {name for stage in stages for name in stage} == set(parameters.values())
