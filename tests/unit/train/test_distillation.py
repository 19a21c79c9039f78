"""The trainer with teachers beside it: closer with every step, the same however rows are cut, and each row to its own
teacher."""

import random
from dataclasses import replace

import pytest
import torch
from training import run, state_of

from sparring.algo.loss.distill import DistillLoss, SampledDistillLoss
from sparring.generation import TopRows
from sparring.model.attention import Packed
from sparring.model.head import score_tokens
from sparring.protocols import Divergence
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample

VOCABULARY = 48


@pytest.fixture(scope="module")
def teachers(make_other):
    """Two models of another shape than the student."""
    return {name: make_other(seed) for seed, name in enumerate(("a", "b"))}


def rows(count=6):
    draw = random.Random(5)
    made = []
    for number in range(count):
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 12)))
        weights = (0.0, 0.0, *[1.0] * (len(tokens) - 2))
        row = Sample(
            id=f"r{number}",
            group="g",
            source="policy",
            tokens=tokens,
            weights={"distill": weights},
            logprobs=(0.0,) * len(tokens),
        )
        made.append(replace(row, teacher="ab"[number % 2], versions=(-1,) * len(tokens), temperature=0.8))
    return made


def batch(samples):
    return Batch(
        step=1,
        model="policy",
        rows=tuple(samples),
        denominators={"distill": sum(sum(row.weights["distill"]) for row in samples)},
    )


def train_student(make_model, loss, samples, *, teachers=None, steps=1, **settings):
    """The metrics of each step, and what the weights are then."""

    async def work(trainer):
        found = []
        for _ in range(steps):
            found.append(await trainer.forward_backward(batch(samples)))
            await trainer.step()
        return found

    model, config = make_model(), TrainConfig(**{"learning_rate": 3e-3, **settings})
    trainer = LocalTrainer(model, config, [loss], name="policy", total_steps=steps, threads=1, teachers=teachers)
    return run(trainer, work), state_of(model)


def with_tops(samples, teachers, make_model, k):
    """Rows with the k likeliest tokens of their teachers, asked of trainers that hold them."""
    made = []
    for row in samples:
        model = teachers[row.teacher]
        tokens = torch.tensor(row.tokens)
        hidden = model.hidden(
            tokens[:-1], torch.arange(len(tokens) - 1), Packed(torch.tensor([0, len(tokens) - 1], dtype=torch.int32))
        )
        judged = score_tokens(model, hidden, tokens[1:], torch.full((len(tokens) - 1,), row.temperature), k)
        pairs = [
            list(zip(*pair, strict=True))
            for pair in zip(judged.top_ids.tolist(), judged.top_logprobs.tolist(), strict=True)
        ]
        logprobs = (0.0, *judged.logprob.tolist())
        made.append(replace(row, tops=TopRows.of([[], *pairs]), annotations={"teacher": logprobs}))
    return made


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize("over", ["top_k", "vocabulary"])
def test_the_divergence_falls(make_model, teachers, over, kind):
    samples = with_tops(rows(), teachers, make_model, 8)
    found, _ = train_student(
        make_model, DistillLoss(Divergence(kind=kind, over=over)), samples, teachers=teachers, steps=8
    )
    divergences = [metrics["divergence"] for metrics in found]
    assert divergences == sorted(divergences, reverse=True) and divergences[-1] < 0.9 * divergences[0]
    assert found[0]["loss_distill"] == pytest.approx(divergences[0], rel=1e-6)


@pytest.mark.parametrize(
    "loss", [DistillLoss(Divergence(over="top_k")), DistillLoss(Divergence()), SampledDistillLoss("squared")]
)
def test_packing_does_not_change_results(make_model, teachers, loss):
    samples = with_tops(rows(), teachers, make_model, 8)
    # steps in proportion to the gradient, and large beside the rounding of a weight: what they differ by, gradients
    # differ by
    how = {"learning_rate": 30.0, "epsilon": 1.0, "gradient_clip": 1e9}
    cut = {
        budget: train_student(make_model, loss, samples, teachers=teachers, token_budget=budget, **how)
        for budget in (8, 4096)
    }
    assert cut[8][0][0]["micro_batches"] > cut[4096][0][0]["micro_batches"]
    assert cut[8][0][0]["loss_distill"] == pytest.approx(cut[4096][0][0]["loss_distill"], rel=1e-5)
    start = make_model().state()
    for name, tensor in cut[8][1].items():
        moved, other = tensor - start[name], cut[4096][1][name] - start[name]
        assert (moved - other).abs().max() <= 1e-5 * other.abs().max()


def test_each_row_is_compared_with_its_own_teacher(make_model, teachers):
    loss = DistillLoss(Divergence())
    samples = rows()
    parts = {name: [row for row in samples if row.teacher == name] for name in "ab"}
    alone = {
        name: train_student(make_model, loss, part, teachers=teachers)[0][0]["divergence"]
        for name, part in parts.items()
    }
    tokens = {name: sum(sum(row.weights["distill"]) for row in part) for name, part in parts.items()}
    together = train_student(make_model, loss, samples, teachers=teachers)[0][0]["divergence"]
    assert together == pytest.approx(sum(alone[name] * tokens[name] for name in "ab") / sum(tokens.values()), rel=1e-5)
    swapped = train_student(make_model, loss, samples, teachers={"a": teachers["b"], "b": teachers["a"]})[0][0][
        "divergence"
    ]
    assert swapped != pytest.approx(together, rel=1e-3)


class Counted:
    """A teacher that knows how many tokens it has computed."""

    def __init__(self, model):
        self._model = model
        self.tokens = 0

    def hidden(self, tokens, *others):
        self.tokens += len(tokens)
        return self._model.hidden(tokens, *others)

    def logits(self, hidden):
        return self._model.logits(hidden)


def test_a_teacher_computes_its_own_rows_alone(make_model, teachers):
    counted = {name: Counted(model) for name, model in teachers.items()}
    samples = rows()
    train_student(make_model, DistillLoss(Divergence()), samples, teachers=counted)
    for name, model in counted.items():
        assert model.tokens == sum(len(row.tokens) - 1 for row in samples if row.teacher == name)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(make_model):
    samples = [replace(row, teacher="a") for row in rows()]
    found, _weights = train_student(make_model, DistillLoss(Divergence()), samples, teachers={"a": make_model()})
    assert found[0]["divergence"] == 0.0 and found[0]["loss_distill"] == 0.0


def test_rows_without_a_teachers_scores_are_refused(make_model):
    with pytest.raises(ValueError, match="a teacher's top-k tokens"):
        train_student(make_model, DistillLoss(Divergence(over="top_k")), rows())
