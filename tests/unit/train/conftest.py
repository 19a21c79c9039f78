"""A tiny real model, and rows sampled (in name) by it."""

import random

import pytest

from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.types import Batch, Sample

VOCABULARY = 48


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A checkpoint folder of some twenty thousand parameters."""
    init = InitConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_positions=64,
        initializer_range=0.2,  # large enough for one bit of one weight to reach the log-probabilities
    )
    return create(init, VOCABULARY, tmp_path_factory.mktemp("model") / "tiny", 7)


@pytest.fixture(scope="session")
def make_other(tmp_path_factory):
    """A model of another shape, of the weights of a seed."""
    init = InitConfig(
        hidden_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=64, initializer_range=0.2
    )
    return lambda seed: load(create(init, VOCABULARY, tmp_path_factory.mktemp("other") / "model", seed))


@pytest.fixture
def make_model(model_path):
    """A fresh model of the same weights at every call."""

    def make(dtype="float32"):
        return load(model_path, dtype=dtype)

    return make


@pytest.fixture
def make_batch():
    """The batch of a step: policy rows of two turns with advantages, behaviour log-probabilities near those of a fresh
    model."""

    def make(step=1, *, rows=9, version=0, seed=0):
        draw = random.Random(1000 * seed + step)
        samples = [_row(draw, f"s{step}-{i}", version) for i in range(rows)]
        count = sum(sum(sample.weights["policy"]) for sample in samples)
        return Batch(step=step, model="policy", rows=tuple(samples), denominators={"policy": count} if samples else {})

    return make


def _row(draw, name, version):
    parts = [(0.0, draw.randint(1, 5)), (1.0, draw.randint(1, 8)), (0.0, draw.randint(1, 4)), (1.0, draw.randint(1, 8))]
    weights = tuple(weight for weight, length in parts for _ in range(length))
    advantage = draw.uniform(-1, 1)
    return Sample(
        id=name,
        group="g",
        source="policy",
        tokens=tuple(draw.randrange(VOCABULARY) for _ in weights),
        weights={"policy": weights},
        logprobs=tuple(draw.uniform(-4.0, -3.7) if weight else 0.0 for weight in weights),
        advantages=tuple(advantage if weight else 0.0 for weight in weights),
        versions=tuple(version if weight else -1 for weight in weights),
        kv_versions=tuple(version if weight else -1 for weight in weights),
    )
