"""Every preference loss against its reference in float64 NumPy: values, gradients, hand-worked numbers, and proof that
each bites."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden import preference as golden
from golden.mutants import mutants
from golden.preference import PAIRWISE, Pair, ScoredReply, gradients

from sparring.algo.loss.preference.bradley_terry import BradleyTerry
from sparring.algo.loss.preference.dpo import Dpo
from sparring.algo.loss.preference.kto import Kto
from sparring.algo.loss.preference.pairs import PairLoss
from sparring.algo.loss.step_labels import StepLabels
from sparring.algo.rare.preference.ipo import Ipo
from sparring.algo.rare.preference.orpo import Orpo
from sparring.algo.rare.preference.robust_dpo import RobustDpo
from sparring.algo.rare.preference.simpo import SimPo
from sparring.batch.denominators import denominators
from sparring.batch.preference import CHOSEN, MISMATCHED, REJECTED, labelled_steps, reply, whole_text
from sparring.batch.tensors import micro_batch
from sparring.batch.units import pack_units

FORMS = {"dpo": Dpo, "robust_dpo": RobustDpo, "ipo": Ipo, "simpo": SimPo, "orpo": Orpo}
CASES = [(name, setting) for name, (_, settings) in PAIRWISE.items() for setting in settings]
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}
COUNT = 5


def row(answer, *, number, label, share=0.5):
    """A row whose reply has the tokens of `answer`, behind a prompt of two tokens that its pair shares."""
    count = len(answer.policy)
    marks = [False, False, *[True] * count]
    tokens = [1, 2 + number, *(10 + 20 * number + 7 * (label < 0) + at for at in range(count))]
    made = reply(tokens, marks, id=f"{number}{label:+}", group=f"pair {number}", label=label, share=share)
    return replace(made, annotations={"reference": (0.0, 0.0, *answer.reference.tolist())})


def pair_rows(pairs):
    rows = [
        row(answer, number=n, label=side)
        for n, pair in enumerate(pairs)
        for answer, side in zip(pair, (1.0, -1.0), strict=True)
    ]
    random.Random(3).shuffle(rows)
    return rows


def computed(loss, rows, given, *, dtype=torch.float64, totals=None, quantity="logprob"):
    """The loss of these rows and its gradients, row by row, where the model says `given` [one array per row] of their
    tokens."""
    totals = totals or denominators(rows)
    micro = micro_batch(rows, totals)
    values = torch.cat([torch.tensor(values, dtype=dtype) for values in given]).requires_grad_()
    places = [(r, at) for r in rows for at, weight in enumerate(next(iter(r.weights.values()))) if weight]
    exact = {
        name: torch.tensor([r.annotations[name][at] for r, at in places], dtype=dtype) for name in micro.annotations
    }
    weights = {term: torch.tensor([r.weights[term][at] for r, at in places], dtype=dtype) for term in micro.weights}
    micro = replace(micro, annotations=exact, weights=weights)
    if loss.needs.survey:
        micro = replace(micro, annotations={**exact, **loss.survey({quantity: values.detach()}, micro)})
    result = loss({quantity: values}, micro)
    result.loss.backward()
    return result.loss.item(), values.grad.split([len(v) for v in given]), result.metrics


def drawn(seed, count=COUNT):
    generator = np.random.default_rng(seed)
    return [Pair(*both) for both in zip(*(golden.draw_replies(generator, count) for _ in range(2)), strict=True)]


def agreement(name, setting, reference, dtype, seed=0):
    """The largest difference of loss and gradients between ours and `reference`, each relative to the largest of its
    kind."""
    pairs = drawn(seed)
    rows = pair_rows(pairs)
    answers = [pairs[int(r.group.split()[1])][r.label < 0] for r in rows]
    found, ours, _ = computed(
        PairLoss(FORMS[name](**setting)), rows, [answer.policy for answer in answers], dtype=dtype
    )

    def loss(tokens):
        known = {
            id(answer): ScoredReply(moved, answer.reference) for answer, moved in zip(answers, tokens, strict=True)
        }
        return reference([Pair(known[id(chosen)], known[id(rejected)]) for chosen, rejected in pairs], **setting)

    expected = gradients(loss, [answer.policy for answer in answers])
    worst = max(np.abs(a - b.double().numpy()).max() for a, b in zip(expected, ours, strict=True))
    value = float(np.real(loss([answer.policy for answer in answers])))
    return max(abs(found - value) / abs(value), worst / max(np.abs(gradient).max() for gradient in expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_value_and_gradients_are_the_references(name, setting, dtype):
    for seed in range(4):
        assert agreement(name, setting, PAIRWISE[name][0], dtype, seed) < RELATIVE[dtype]


@pytest.mark.parametrize("name", FORMS)
def test_one_turned_sign_is_noticed(name):
    reference, settings = PAIRWISE[name]
    every = list(mutants(reference))
    assert len(every) >= 3
    for line, mutant in every:
        # a sign in front of what a setting makes zero is seen under another setting
        assert max(agreement(name, setting, mutant, torch.float64) for setting in settings) > 1e-3, line


def test_the_example_worked_by_hand():
    chosen, rejected = (
        ScoredReply(np.array([-0.5, -0.7]), np.array([-0.8, -0.8])),
        ScoredReply(np.array([-2.0]), np.array([-1.6])),
    )
    rows = [row(chosen, number=0, label=1.0), row(rejected, number=0, label=-1.0)]
    by_hand = [
        (Dpo(beta=0.5), 0.5130153),
        (Dpo(beta=0.5, label_smoothing=0.1), 0.5530153),
        (RobustDpo(beta=0.5, flip_rate=0.1), 0.4630153),
        (Ipo(beta=0.5), 0.04),
        (Ipo(beta=0.5, length_averaged=True), 0.16),
        (SimPo(beta=2.0, gamma=0.5), 0.0955455),
        (Orpo(strength=0.5), 0.0605227),
    ]
    for form, expected in by_hand:
        found, _, metrics = computed(PairLoss(form), rows, [chosen.policy, rejected.policy])
        assert found == pytest.approx(expected, abs=1e-7), form
        assert metrics["accuracy"] == (1.0, 1)
    assert metrics["reward_margin"][0] == pytest.approx(2.0504569, abs=1e-7)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_any_packing_gives_the_same(name, setting):
    """Pairs in several micro-batches, each with the denominators of all."""
    pairs = drawn(1, 7)
    rows = pair_rows(pairs)
    answer = {r.id: pairs[int(r.group.split()[1])][r.label < 0].policy for r in rows}
    loss, totals = PairLoss(FORMS[name](**setting)), denominators(rows)
    whole, gradient, _ = computed(loss, rows, [answer[r.id] for r in rows])
    expected = dict(zip([r.id for r in rows], gradient, strict=True))
    for budget in (1, 20, 45):
        packs = pack_units(rows, budget, {"preference"})
        assert len(packs) > 1
        total = 0.0
        for part in packs:
            value, parts, _ = computed(loss, part, [answer[r.id] for r in part], totals=totals)
            total += value
            for r, found in zip(part, parts, strict=True):
                torch.testing.assert_close(found, expected[r.id], rtol=1e-9, atol=0)
        assert total == pytest.approx(whole, rel=1e-9)


def test_equal_models_know_nothing():
    """Where policy and reference are one, rewards are exactly zero, and a tie is half right."""
    answers = [answer for pair in drawn(2) for answer in pair]
    rows = [
        replace(made, annotations={"reference": (0.0, 0.0, *answer.policy.tolist())})
        for n, answer in enumerate(answers)
        for made in [row(answer, number=n // 2, label=-1.0 if n % 2 else 1.0)]
    ]
    value, _, metrics = computed(PairLoss(Dpo()), rows, [answer.policy for answer in answers], dtype=torch.float32)
    assert value == pytest.approx(np.log(2.0), rel=1e-6)
    assert metrics == {
        "accuracy": (2.5, 5),
        **{f"reward_{what}": (0.0, 5) for what in ("margin", "chosen", "rejected")},
    }


def test_a_reply_of_two_branches_is_one_reply():
    """The side of a pair is all its rows: what a branch shares with another is weighed once, in one of them."""
    pair = drawn(5, 1)[0]
    whole = [row(answer, number=0, label=side) for answer, side in zip(pair, (1.0, -1.0), strict=True)]
    value, _, _ = computed(PairLoss(SimPo()), whole, [answer.policy for answer in pair])
    long = max(pair, key=lambda answer: len(answer.policy))
    assert len(long.policy) > 1
    other = whole[0] if long is pair.rejected else whole[1]
    label = 1.0 if long is pair.chosen else -1.0
    halves = [ScoredReply(long.policy[:1], long.reference[:1]), ScoredReply(long.policy[1:], long.reference[1:])]
    rows = [*(replace(row(half, number=0, label=label), id=f"half {n}") for n, half in enumerate(halves)), other]
    given = [*(half.policy for half in halves), (pair.rejected if long is pair.chosen else pair.chosen).policy]
    assert computed(PairLoss(SimPo()), rows, given, totals={"preference": 1.5})[0] == pytest.approx(value, rel=1e-9)


def test_half_a_pair_is_no_pair():
    pair = drawn(0, 1)[0]
    with pytest.raises(ValueError, match="a pair without a chosen or without a rejected reply"):
        computed(PairLoss(Dpo()), [row(pair.chosen, number=0, label=1.0)], [pair.chosen.policy])


def kto_rows(wanted, unwanted, strangers):
    kinds = [*((answer, CHOSEN) for answer in wanted), *((answer, REJECTED) for answer in unwanted)]
    kinds += [(answer, MISMATCHED) for answer in strangers]
    rows = [row(answer, number=n, label=label, share=1.0) for n, (answer, label) in enumerate(kinds)]
    return rows, [answer for answer, _ in kinds]


def kto_agreement(reference, dtype, *, sign):
    """As `agreement`; the mean of the mismatched rows' log-ratios has the sign `sign`."""
    generator = np.random.default_rng(4)
    wanted, unwanted, strangers = (golden.draw_replies(generator, n) for n in (3, 4, 5))
    strangers = [ScoredReply(r.reference + sign * 0.3, r.reference) for r in strangers]
    rows, answers = kto_rows(wanted, unwanted, strangers)
    loss = Kto(beta=0.4, wanted=1.3, unwanted=0.7)
    found, ours, metrics = computed(loss, rows, [answer.policy for answer in answers], dtype=dtype)

    def of(tokens):
        moved = [ScoredReply(policy, answer.reference) for policy, answer in zip(tokens, answers, strict=True)]
        return reference(moved[:3], moved[3:7], moved[7:], beta=0.4, desirable=1.3, undesirable=0.7)

    policy = [answer.policy for answer in answers]
    expected, value = gradients(of, policy), float(np.real(of(policy)))
    assert all(not gradient.any() for gradient in ours[7:])  # no gradient through the shift
    worst = max(np.abs(a - b.double().numpy()).max() for a, b in zip(expected, ours, strict=True))
    return max(abs(found - value) / abs(value), worst / max(np.abs(g).max() for g in expected)), metrics


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_kto_is_the_reference(dtype, sign):
    difference, metrics = kto_agreement(golden.kto, dtype, sign=sign)
    assert difference < RELATIVE[dtype]
    assert (metrics["kto_shift"][0] > 0) == (sign > 0)


def test_one_turned_sign_is_noticed_by_kto():
    every = list(mutants(golden.kto))
    assert len(every) >= 6
    for line, mutant in every:
        assert kto_agreement(mutant, torch.float64, sign=1)[0] > 1e-3, line


def test_kto_by_hand():
    answers = [
        ScoredReply(np.array(policy), np.array(known))
        for policy, known in (([-0.5, -0.7], [-0.8, -0.8]), ([-2.0], [-1.6]), ([-0.1], [-0.3]))
    ]
    rows, _ = kto_rows(answers[:1], answers[1:2], answers[2:])
    assert computed(Kto(beta=0.5), rows, [answer.policy for answer in answers])[0] == pytest.approx(0.4502891, abs=1e-7)


def reward_agreement(reference, dtype, *, centre=0.2):
    generator = np.random.default_rng(6)
    chosen, rejected, margins = generator.normal(size=(3, COUNT))
    rows = [
        whole_text((1, 2, 3 + n), id=f"{n}{label}", group=str(n), label=label, margin=float(margins[n]))
        for label, n in itertools.product((CHOSEN, REJECTED), range(COUNT))
    ]
    given = [np.array([value]) for value in (*chosen, *rejected)]
    found, ours, _ = computed(BradleyTerry(centre=centre), rows, given, dtype=dtype, quantity="value")

    def of(values):
        return reference(np.concatenate(values[:COUNT]), np.concatenate(values[COUNT:]), margins, centre=centre)

    expected, value = np.concatenate(gradients(of, given)), float(np.real(of(given)))
    worst = np.abs(expected - torch.cat(ours).double().numpy()).max()
    return max(abs(found - value) / abs(value), worst / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reward_model_is_the_reference(dtype):
    assert reward_agreement(golden.bradley_terry, dtype) < RELATIVE[dtype]


def test_one_turned_sign_is_noticed_by_the_reward_model():
    for line, mutant in mutants(golden.bradley_terry):
        assert reward_agreement(mutant, torch.float64) > 1e-3, line


def steps_agreement(reference, dtype):
    generator = np.random.default_rng(8)
    values, labels = generator.normal(size=7), np.array([1.0, 0.0, 1.0, 0.3, 0.0, 1.0, 0.8])
    rows = [
        labelled_steps(range(1, 12), dict(zip((3, 6, 11), labels[:3], strict=True)), id="a"),
        labelled_steps(range(1, 10), dict(zip((2, 4, 5, 9), labels[3:], strict=True)), id="b"),
    ]
    found, ours, _ = computed(StepLabels(), rows, [values[:3], values[3:]], dtype=dtype, quantity="value")
    expected = gradients(lambda moved: reference(moved[0], labels), [values])[0]
    value = float(np.real(reference(values, labels)))
    worst = np.abs(expected - torch.cat(ours).double().numpy()).max()
    return max(abs(found - value) / abs(value), worst / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_step_labels_are_the_reference(dtype):
    assert steps_agreement(golden.step_labels, dtype) < RELATIVE[dtype]


def test_one_turned_sign_is_noticed_by_step_labels():
    for line, mutant in mutants(golden.step_labels):
        assert steps_agreement(mutant, torch.float64) > 1e-3, line


LABELS = {"chosen": CHOSEN, "wanted": CHOSEN, "rejected": REJECTED, "unwanted": REJECTED, "mismatched": MISMATCHED}


def rows_of_vector(vector):
    """Our rows of its inputs, and what the model says of each."""
    if vector.name == "step_labels":
        values, labels = vector.inputs["values"], vector.inputs["labels"]
        yield (
            labelled_steps(
                range(1, len(values) + 1), dict(zip(range(1, len(values) + 1), labels, strict=True)), id="a"
            ),
            values,
        )
    elif vector.name == "bradley_terry":
        for side in ("chosen", "rejected"):
            for n, value in enumerate(vector.inputs[side]):
                margin = vector.inputs["margins"][n]
                yield whole_text((1, 2, n), id=f"{side} {n}", group=str(n), label=LABELS[side], margin=margin), [value]
    else:
        single = vector.name == "kto"
        for side, replies in vector.inputs.items():
            for n, reply in enumerate(replies):
                answer = ScoredReply(*map(np.array, reply))
                made = row(answer, number=n, label=LABELS[side], share=1.0 if single else 0.5)
                yield (replace(made, group=f"{side} {n}") if single else made), answer.policy


def loss_of_vector(vector):
    settings = vector.settings
    if vector.name == "kto":
        return Kto(beta=settings["beta"], wanted=settings["desirable"], unwanted=settings["undesirable"])
    others = {"bradley_terry": BradleyTerry, "step_labels": StepLabels}
    return others[vector.name](**settings) if vector.name in others else PairLoss(FORMS[vector.name](**settings))


@pytest.mark.parametrize("vector", golden.vectors(), ids=lambda vector: f"{vector.name} {vector.settings}")
def test_the_vectors_are_ours_too(vector):
    """What is written for other implementations to be held against."""
    rows, given = zip(*rows_of_vector(vector), strict=True)
    loss = loss_of_vector(vector)
    value, found, _ = computed(loss, rows, given, quantity=next(iter(loss.needs.quantities)))
    assert value == pytest.approx(vector.loss, rel=1e-9)
    expected = np.concatenate([np.ravel(part) for side in vector.gradients.values() for part in side])
    np.testing.assert_allclose(torch.cat(found).numpy(), expected, rtol=1e-8, atol=1e-12)
