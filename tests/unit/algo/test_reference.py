"""The reference's log-probabilities: from a real engine, to the bit what the trainer of the same weights says."""

import asyncio
from dataclasses import replace

from sparring.algo.annotate.reference import Reference
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Sample


def test_an_engine_says_what_the_trainer_says(tmp_path):
    path = tiny_model("qwen3", tmp_path / "model")
    marks = ((0, 0, 1, 1, 0, 1), (0, 1, 1), (0, 0, 0))
    rows = [
        Sample(
            id=str(n),
            group="g",
            source="policy",
            tokens=tuple(range(3 + n, 3 + n + len(weights))),
            weights={"policy": tuple(map(float, weights))},
            annotations={"other": (2.0,) * len(weights)},
            temperature=0.7,
        )
        for n, weights in enumerate(marks)
    ]

    async def both():
        engine = NativeEngine(load(path), EngineConfig(kv_bytes=1 << 20), name="reference")
        trainer = LocalTrainer(load(path), TrainConfig(), [], name="policy", total_steps=1)
        try:
            return await Reference(engine).annotate(rows), await trainer.forward(rows, frozenset({"logprob"}))
        finally:
            await engine.close()
            await trainer.close()

    annotated, expected = asyncio.run(both())
    for row, found, values, weights in zip(rows, annotated, expected, marks, strict=True):
        known = found.annotations["reference"]
        assert replace(found, annotations=row.annotations) == row and found.annotations["other"] == row.annotations["other"]
        assert [value for value, weight in zip(known, weights, strict=True) if weight] == [
            value for value, weight in zip(values["logprob"], weights, strict=True) if weight
        ]
        first = weights.index(1) if any(weights) else len(weights)
        assert not any(known[:first]) and all(known[first:])
