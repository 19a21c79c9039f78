"""The trainer on a tiny real model."""

import gc
from dataclasses import replace

import pytest
import torch
from training import equal, gradients, run, saved_optimiser, state_of

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.demonstration import demonstration, demonstration_batch
from sparring.batch.tensors import micro_batch
from sparring.errors import BadInput
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample
from sparring.weights.inline import fetch

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]


def make_trainer(model, threads=1, **settings):
    config = TrainConfig(**{"learning_rate": 1e-2, "token_budget": 64, **settings})
    losses = [PolicyLoss(AlgoConfig()), ImitateLoss()]
    return LocalTrainer(model, config, losses, name="policy", total_steps=20, threads=threads)


def logprobs(model, rows):
    """Every weighted token's log-probability, row by row, from one micro-batch of `rows`, with gradients on."""
    micro = micro_batch(rows, {"policy": 1.0})
    hidden = model.hidden(micro.tokens, micro.positions, Packed(micro.cu_seqlens, micro.shared))
    found = token_quantities(model, hidden[micro.predicting], micro.targets, micro.temperature, {"logprob"})["logprob"]
    return found.detach().split([sum(1 for weight in row.weights["policy"] if weight) for row in rows])


def sampled_by_model(model, batch):
    """The batch as the model itself would have sampled it: with its own log-probabilities, each row computed alone."""
    rows = []
    for row in batch.rows:
        values = iter(logprobs(model, [row])[0].tolist())
        rows.append(replace(row, logprobs=tuple(next(values) if weight else 0.0 for weight in row.weights["policy"])))
    return replace(batch, rows=tuple(rows))


def test_any_token_budget_gives_the_same_gradients(make_model, make_batch):
    batch = make_batch()
    whole = make_model()
    metrics = run(make_trainer(whole, token_budget=10_000), lambda t: t.forward_backward(batch))
    assert metrics["micro_batches"] == 1
    for budget, least in ((1, 9), (30, 3), (64, 2)):
        split = make_model()
        parts = run(make_trainer(split, token_budget=budget), lambda t: t.forward_backward(batch))
        assert parts["micro_batches"] >= least
        assert parts["loss_policy"] == pytest.approx(metrics["loss_policy"], abs=1e-6)
        assert parts["entropy"] == pytest.approx(metrics["entropy"], rel=1e-6)
        assert parts["tokens_trained"] == metrics["tokens_trained"] == batch.denominators["policy"]
        for name, expected in gradients(whole).items():
            torch.testing.assert_close(gradients(split)[name], expected, atol=2e-6, rtol=1e-4)


def test_any_number_of_threads_gives_the_same_gradients_to_the_bit(make_model, make_batch):
    batch, found = make_batch(rows=60), []
    for threads in (1, 2, 5):
        model = make_model()
        metrics = run(make_trainer(model, threads, token_budget=10_000), lambda t: t.forward_backward(batch))
        assert metrics["micro_batches"] == 2
        found.append((gradients(model), {name: value for name, value in metrics.items() if not name.endswith("_s")}))
    for others, measured in found[1:]:
        assert measured == found[0][1]
        assert equal(found[0][0], others)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_results_are_packing_independent_in_every_family_and_with_few_rows(family, make_batch, tmp_path):
    path, batch = tiny_model(family, tmp_path, seed=1, vocab_size=48), make_batch()
    once, twice = load(path), load(path)
    for threads, model in ((1, once), (2, twice)):
        metrics = run(make_trainer(model, threads, token_budget=40), lambda t: t.forward_backward(batch))
        assert metrics["micro_batches"] > 2
    assert equal(gradients(once), gradients(twice))


class Counting(PolicyLoss):
    """Counts, at each micro-batch, the tensors of the embedding's shape that were made since the freeze: gradients."""

    def __call__(self, quantities, micro):
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        self.found.append(sum(one.shape == self.shape for one in tensors))
        return super().__call__(quantities, micro)


def test_gradients_of_a_micro_batch_do_not_outlive_their_sum(make_model, make_batch):
    model, loss = make_model(), Counting(AlgoConfig())
    loss.shape, loss.found = model.module.get_input_embeddings().weight.shape, []
    trainer = LocalTrainer(model, TrainConfig(token_budget=30), [loss], name="policy", total_steps=1)
    gc.collect()
    gc.freeze()  # what other tests left is not looked through at each micro-batch
    run(trainer, lambda t: t.forward_backward(make_batch()))
    first, second, *later = loss.found  # the first gradients are what the later ones are added to
    assert first == 0 < second and later and set(later) == {second}


def test_an_error_in_the_second_lane_is_raised_and_the_trainer_continues(make_model, make_batch):
    """The row that cannot be computed is in the second of two micro-batches."""
    batch = make_batch(rows=60)
    last = max(range(60), key=lambda i: batch.rows[i].tokens)
    bad = replace(batch.rows[last], tokens=(*batch.rows[last].tokens[:-1], 10**6))
    rows = tuple(bad if i == last else row for i, row in enumerate(batch.rows))

    async def work(trainer):
        with pytest.raises(BadInput, match="1000000"):
            await trainer.forward_backward(replace(batch, rows=rows))
        return await trainer.forward_backward(batch)

    metrics = run(make_trainer(make_model(), 2, token_budget=10_000), work)
    assert metrics["micro_batches"] == 2


def test_fresh_tokens_have_zero_difference_and_a_flipped_bit_shows(make_model, make_batch):
    model = make_model()
    batch = sampled_by_model(model, make_batch())
    metrics = run(make_trainer(model), lambda t: t.forward_backward(batch))
    assert metrics["logprob_max_abs_diff"] == metrics["logprob_mean_abs_diff"] == metrics["mismatch_k3"] == 0.0
    assert metrics["mismatch_ess"] == 1.0
    assert (metrics["logprob_stale_share"], metrics["ratio"], metrics["clip_fraction"]) == (0.0, 1.0, 0.0)
    assert "logprob_stale_max_abs_diff" not in metrics
    other = make_model()
    weight = other.module.get_parameter("model.norm.weight")
    with torch.no_grad():
        weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    other.refresh()
    metrics = run(make_trainer(other), lambda t: t.forward_backward(batch))
    assert metrics["logprob_max_abs_diff"] > 0.0


def test_tokens_of_other_versions_or_caches_are_measured_apart(make_model, make_batch):
    batch = make_batch(rows=4)
    cached = replace(batch.rows[0], kv_versions=tuple(-1 if v < 0 else v - 1 for v in batch.rows[0].versions))
    older = replace(batch.rows[1], versions=tuple(-1 if v < 0 else v + 1 for v in batch.rows[1].versions))
    mixed = replace(batch, rows=(cached, older, *batch.rows[2:]))
    metrics = run(make_trainer(make_model()), lambda t: t.forward_backward(mixed))
    stale = sum(sum(row.weights["policy"]) for row in mixed.rows[:2])
    assert metrics["logprob_stale_share"] == stale / batch.denominators["policy"]
    assert metrics["logprob_stale_max_abs_diff"] > 0 < metrics["logprob_max_abs_diff"]


def test_training_on_demonstrations_learns_them(make_model):
    rows = [demonstration([1, 2, i, 3 * i % 48, 5 * i % 48, 4], [False] * 3 + [True] * 3, str(i)) for i in range(8)]

    async def learn(trainer):
        losses = []
        for step in range(1, 31):
            metrics = await trainer.forward_backward(demonstration_batch(rows, step=step, model="policy"))
            losses.append(metrics["loss_imitate"])
            result = await trainer.step()
        assert "logprob_max_abs_diff" not in metrics, "nothing was sampled, so there is nothing to compare"
        assert result.version == trainer.version == 30
        return losses

    losses = run(make_trainer(make_model()), learn)
    assert losses[0] > 3.5 and losses[-1] < 0.7


def test_policy_steps_raise_the_probability_of_good_tokens(make_model, make_batch):
    model = make_model()
    batch = sampled_by_model(model, make_batch())
    before = [values.mean() for values in logprobs(model, batch.rows)]

    async def once(trainer):
        await trainer.forward_backward(batch)
        return await trainer.step()

    result = run(make_trainer(model, learning_rate=1e-4), once)
    assert result.metrics["updated"] == 1.0 and result.metrics["grad_norm"] > 0
    after = [values.mean() for values in logprobs(model, batch.rows)]
    advantages = [row.advantages[-1] for row in batch.rows]
    assert sum(a * (new - old) for a, old, new in zip(advantages, before, after, strict=True)) > 0


def test_an_empty_batch_advances_only_the_version(make_model):
    model = make_model()
    before = state_of(model)

    async def nothing(trainer):
        metrics = await trainer.forward_backward(Batch(step=1, model="policy", rows=(), denominators={}))
        return metrics, await trainer.step()

    metrics, result = run(make_trainer(model), nothing)
    assert (metrics["tokens_trained"], result.version, result.metrics["updated"]) == (0.0, 1, 0.0)
    assert equal(model.state(), before)


def test_clipping_bounds_the_global_norm(make_model, make_batch):
    """With clipping, AdamW's first moment after one step is (1 - beta1) times a gradient of the norm that was
    allowed."""

    async def once(trainer):
        await trainer.forward_backward(make_batch())
        return await trainer.step(), await saved_optimiser(trainer)

    for clip, expected in ((0.01, 0.01), (0.0, None), (100.0, None)):
        trainer = make_trainer(make_model(), gradient_clip=clip)
        result, state = run(trainer, once)
        norm = result.metrics["grad_norm"]
        moments = [value for name, value in state.items() if name.startswith("exp_avg/")]
        length = torch.cat([moment.flatten() for moment in moments]).norm().item() / 0.1
        assert norm > 0.01 and length == pytest.approx(expected or norm, rel=1e-4)


def test_push_publishes_a_copy_with_a_probe(make_model, make_batch):
    model = make_model()

    async def push_and_go_on(trainer):
        await trainer.forward_backward(make_batch())
        await trainer.step()
        ref = await trainer.push()
        published = state_of(model)
        await trainer.forward_backward(make_batch(2))
        await trainer.step()
        return ref, published

    ref, published = run(make_trainer(model), push_and_go_on)
    got = fetch(ref)
    assert ref.version == 1 and equal(got, published)
    assert not equal(model.state(), got), "the trainer went on"
    other = make_model()
    other.load_state(got)
    tokens, values = ref.probe
    row = torch.tensor(tokens)
    hidden = other.hidden(row[:-1], torch.arange(len(row) - 1), Packed.of([len(row) - 1]))
    found = token_quantities(other, hidden, row[1:], torch.ones(len(row) - 1), {"logprob"})["logprob"]
    assert found.tolist() == list(values)


def test_wrong_batches_are_refused(make_model, make_batch):
    batch = make_batch()
    with pytest.raises(ValueError, match="expected rows of model policy"):
        run(make_trainer(make_model()), lambda t: t.forward_backward(replace(batch, model="critic")))
    with pytest.raises(ValueError, match="expected terms out of"):
        run(make_trainer(make_model()), lambda t: t.forward_backward(replace(batch, denominators={"value": 1.0})))


def test_a_loss_with_an_unsupported_unit_is_refused(make_model):
    class Grouped(ImitateLoss):
        needs = replace(ImitateLoss.needs, unit="group")

    with pytest.raises(BadInput, match="expected one of the units"):
        LocalTrainer(make_model(), TrainConfig(), [Grouped()], name="policy", total_steps=1)


def test_bfloat16_trains_float32_masters(make_model, make_batch):
    model = make_model("bfloat16")

    async def steps(trainer):
        for step in range(1, 4):
            await trainer.forward_backward(make_batch(step))
            await trainer.step()
        return await saved_optimiser(trainer)

    state = run(make_trainer(model, learning_rate=1e-5, token_budget=20), steps)
    weights = model.state()
    masters = {name.removeprefix("master/"): value for name, value in state.items() if name.startswith("master/")}
    assert masters.keys() == weights.keys()
    for name, master in masters.items():
        assert master.dtype == torch.float32 and weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], master.to(torch.bfloat16))
    finer = [name for name, master in masters.items() if not torch.equal(master, weights[name].float())]
    assert len(finer) > len(masters) / 2, "steps too small for bfloat16 must add up in the masters"


def test_bfloat16_micro_batches_accumulate_each_gradient_once(make_model, make_batch):
    async def once(trainer):
        await trainer.forward_backward(make_batch())
        return await trainer.step()

    whole = run(make_trainer(make_model("bfloat16"), token_budget=10_000), once).metrics["grad_norm"]
    split = run(make_trainer(make_model("bfloat16"), token_budget=1), once).metrics["grad_norm"]
    assert split == pytest.approx(whole, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_forward_has_the_bits_of_the_training_forward(make_model, make_batch, dtype, budget):
    """Its log-probabilities, recorded as those of the sampling policy, differ from the training forward's by
    nothing."""
    batch, model = make_batch(), make_model(dtype)
    # credit has not spoken yet, or has said nothing that matters here: every weighed token has a value all the same
    rows = [
        replace(row, advantages=None if place % 2 else (0.0,) * len(row.tokens)) for place, row in enumerate(batch.rows)
    ]

    async def work(trainer):
        found = await trainer.forward(rows, {"logprob", "entropy"})
        named = [replace(row, logprobs=values["logprob"]) for row, values in zip(batch.rows, found, strict=True)]
        return found, await trainer.forward_backward(replace(batch, rows=tuple(named)))

    found, metrics = run(make_trainer(model, token_budget=budget), work)
    assert metrics["logprob_max_abs_diff"] == 0.0
    for row, values, alone in zip(batch.rows, found, (logprobs(model, [row])[0] for row in batch.rows), strict=True):
        there = [weight != 0 for weight in row.weights["policy"]]
        assert [v for v, yes in zip(values["logprob"], there, strict=True) if yes] == alone.tolist()
        assert all((v > 0) == yes for v, yes in zip(values["entropy"], there, strict=True))
        assert all(v == 0 for v, yes in zip(values["logprob"], there, strict=True) if not yes)


def test_forward_does_not_affect_training(make_model, make_batch):
    """Between two steps it changes no weight and no gradient; before and after them it sees other weights."""
    batch, plain, watched = make_batch(), make_model(), make_model()

    async def annotated(trainer):
        first = await trainer.forward(batch.rows)
        await trainer.forward_backward(batch)
        assert await trainer.forward(batch.rows) == first
        await trainer.step()
        assert await trainer.forward(batch.rows) != first
        await trainer.forward_backward(batch)

    async def trained(trainer):
        await trainer.forward_backward(batch)
        await trainer.step()
        await trainer.forward_backward(batch)

    run(make_trainer(watched), annotated)
    run(make_trainer(plain), trained)
    assert equal(gradients(watched), gradients(plain))


def test_forward_of_unweighted_rows_and_of_no_rows(make_model):
    row = Sample(id="silent", group="g", source="policy", tokens=(3, 4, 5), weights={})
    found = run(make_trainer(make_model()), lambda t: t.forward([row, row]))
    assert found == [{"logprob": (0.0, 0.0, 0.0)}] * 2
    assert run(make_trainer(make_model()), lambda t: t.forward([])) == []
