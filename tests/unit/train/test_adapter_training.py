"""A trainer of an adapter: it alone learns, is saved, restored and published, and the engine serves it in the trainer's
bits."""

import asyncio

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from training import equal, run, saved_optimiser

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]


@pytest.fixture(scope="module", params=["a layer's", "experts'"])
def folder(request, model_path, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapter")
    if request.param == "a layer's":
        return tiny_adapter(model_path, out / "a", seed=1, target_modules=("q_proj", "v_proj", "up_proj"))
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    base = tiny_model("qwen3_moe", out / "base", seed=1, vocab_size=48)
    return tiny_adapter(base, out / "a", seed=1, target_modules=("v_proj",), target_parameters=stacks)


def train(model, steps, *, restore=None, save_at=None, path=None, threads=1):
    """Final adapter, optimiser state, metrics of each step, the checkpoint written at `save_at`."""
    config = TrainConfig(learning_rate=1e-2, weight_decay=0.1, token_budget=40)
    trainer = LocalTrainer(model, config, [PolicyLoss(AlgoConfig())], name="policy", total_steps=8, threads=threads)

    async def work(trainer):
        ref, metrics = None, []
        if restore is not None:
            await trainer.restore(restore)
        for batch in steps:
            found = await trainer.forward_backward(batch)
            metrics.append({**found, **(await trainer.step()).metrics})
            if batch.step == save_at:
                ref = await trainer.save(str(path), stage="rl", metrics={})
        published = await trainer.push()
        return published, await saved_optimiser(trainer), metrics, ref

    return run(trainer, work)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_learns(folder, model_path, make_batch, dtype):
    model, before = load(folder, dtype=dtype), load(folder, dtype=dtype)
    published, optimiser, metrics, _ = train(model, [make_batch(step) for step in range(1, 4)])
    assert equal(model.state(), before.state())
    was = before.adapters.everywhere.state()
    assert published.adapter == "policy" and published.location.keys() == was.keys()
    assert all(name == "lora_scale" or not torch.equal(was[name], value) for name, value in published.location.items())
    assert {name.partition("/")[2] for name in optimiser} == was.keys() - {"lora_scale"}
    assert all(step["updated"] == 1.0 for step in metrics)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bitwise_and_small(folder, make_batch, dtype, tmp_path):
    steps = [make_batch(step) for step in range(1, 7)]
    published, optimiser, _, ref = train(load(folder, dtype=dtype), steps, save_at=3, path=tmp_path / "c")
    again, optimiser_again, _, _ = train(load(folder, dtype=dtype), steps[3:], restore=ref, threads=2)
    assert again.checksum == published.checksum and again.version == published.version == 6
    assert equal(optimiser, optimiser_again)
    short, *_ = train(load(folder, dtype=dtype), steps[3:5], restore=ref)
    assert short.checksum != published.checksum, "a step less must show"
    size = (tmp_path / "c/model.safetensors").stat().st_size
    assert size < 0.5 * sum(t.nbytes for t in load(folder, dtype=dtype).state().values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_under_each_pushed_version_is_trained_with_difference_zero(folder, dtype):
    """Three rounds: sample, train on it, push in flight. One bit of the adapter shows."""
    model, config = load(folder, dtype=dtype), TrainConfig(learning_rate=1e-2)
    trainer = LocalTrainer(model, config, [PolicyLoss(AlgoConfig())], name="policy", total_steps=9, threads=1)

    async def rounds(engine):
        found = []
        for step in range(1, 5):
            asked = [
                GenerateRequest(id=str(i), tokens=tuple(range(i + 1, i + 9)), sampling=Sampling(seed=i, max_tokens=12))
                for i in range(6)
            ]
            answers = await asyncio.gather(*map(engine.generate, asked))
            rows = tuple(row(request, answer, step) for request, answer in zip(asked, answers, strict=True))
            batch = Batch(step=step, model="policy", rows=rows, denominators={"policy": 72})
            if step == 4:
                factor = next(iter(model.adapters.everywhere.parameters().values()))
                with torch.no_grad():
                    factor[0, 0] += 1e-2
                model.adapters.everywhere.refresh()
            found.append(await trainer.forward_backward(batch))
            await trainer.step()
            await engine.pull(await trainer.push())
            assert engine.version == trainer.version == step
        return found

    async def served(trainer):
        engine = NativeEngine(load(folder, dtype=dtype), EngineConfig(), threads=1)
        try:
            return await rounds(engine)
        finally:
            await engine.close()

    *exact, broken = [metrics["logprob_max_abs_diff"] for metrics in run(trainer, served)]
    assert exact == [0.0, 0.0, 0.0] and broken > 0


def row(request, answer, step):
    tokens, prompt = (*request.tokens, *answer.tokens), len(request.tokens)
    weights = (*[0.0] * prompt, *[1.0] * len(answer.tokens))
    assert answer.versions.values == (step - 1,)
    return Sample(
        id=request.id,
        group="g",
        source="policy",
        tokens=tokens,
        weights={"policy": weights},
        logprobs=(*[0.0] * prompt, *answer.logprobs),
        advantages=tuple((1.0 if int(request.id) % 2 else -1.0) * weight for weight in weights),
        versions=(*[-1] * prompt, *answer.versions.expand()),
        kv_versions=(*[-1] * prompt, *answer.kv_versions.expand()),
    )
