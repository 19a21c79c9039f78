"""Quantities in chunks: the same bits for any chunking, with or without recomputation in the backward pass."""

import pytest
import torch

from sparring.errors import BadInput
from sparring.model import head
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3", tied=False)


def inputs(count):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 48, generator=generator, requires_grad=True)
    return hidden, torch.randint(VOCABULARY, (count,), generator=generator), torch.full((count,), 0.9)


def test_chunks_do_not_show(path):
    model = load(path)
    hidden, targets, heat = inputs(2 * head.CHUNK_ROWS + 5)
    found = head.token_quantities(model, hidden, targets, heat, {"logprob", "entropy"})
    for part in (slice(0, 1), slice(1020, 1030), slice(2047, None)):
        alone = head.token_quantities(model, hidden[part], targets[part], heat[part], {"logprob", "entropy"})
        assert torch.equal(alone["logprob"], found["logprob"][part])
        assert torch.equal(alone["entropy"], found["entropy"][part])


def test_recomputation_gives_the_same_gradients(path):
    gradients = []
    count = 2 * head.CHUNK_ROWS + 5
    for limit in (count * VOCABULARY, count * VOCABULARY - 1):
        model = load(path)
        hidden, targets, heat = inputs(count)
        found = head.token_quantities(model, hidden, targets, heat, {"logprob"}, keep_elements=limit)
        found["logprob"].sum().backward()
        gradients.append((hidden.grad, model.state()["lm_head.weight"], dict(model.module.named_parameters())["lm_head.weight"].grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][2], gradients[1][2])


def test_what_is_added_to_logits_is_added_in_every_chunk(path):
    model = load(path)
    count = head.CHUNK_ROWS + 3
    found = []
    for limit in (count * VOCABULARY, 0):
        hidden, targets, heat = inputs(count)
        rows = [[(7, -torch.inf), (5, 1.5), (VOCABULARY, 3.0), (-1, 2.0)] if n % 2 and targets[n] != 7 else [] for n in range(count)]
        pairs = [pair for row in rows for pair in row]
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        bias = (offsets, torch.tensor([id for id, _ in pairs]), torch.tensor([value for _, value in pairs]))
        needs = {"logprob", "entropy"}
        quantities = head.token_quantities(model, hidden, targets, heat, needs, bias=bias, keep_elements=limit)
        found.append([*quantities.values(), *torch.autograd.grad(sum(q.sum() for q in quantities.values()), hidden)])
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*found, strict=True))
    logits = model.logits(hidden.detach()).double()
    for n in range(count):
        for id, value in rows[n][:2]:
            logits[n, id] += value
    expected = torch.log_softmax(logits / heat.double().unsqueeze(1), 1)
    assert torch.allclose(found[0][0].double(), expected.gather(1, targets.unsqueeze(1))[:, 0], atol=1e-5)
    weights = expected.exp()
    assert torch.allclose(found[0][1].double(), -(weights * expected.clamp(min=-1e9)).sum(1), atol=1e-5)


def test_only_what_is_needed_comes_back_and_nothing_unknown(path):
    model = load(path)
    hidden, targets, heat = inputs(3)
    assert set(head.token_quantities(model, hidden, targets, heat, {"entropy"})) == {"entropy"}
    assert head.token_quantities(model, hidden[:0], targets[:0], heat[:0], {"logprob"})["logprob"].shape == (0,)
    with pytest.raises(BadInput, match="top_k"):
        head.token_quantities(model, hidden, targets, heat, {"top_k"})


def test_judging_gives_the_quantities_and_names_equal_logits_by_id(path):
    model = load(path)
    hidden, targets, heat = inputs(head.CHUNK_ROWS + 5)
    found = head.token_quantities(model, hidden, targets, heat, {"logprob", "entropy"})
    judged = head.judge(model, hidden, targets, heat, 4)
    assert torch.equal(judged.logprob, found["logprob"]) and torch.equal(judged.entropy, found["entropy"])
    assert judged.top_ids.shape == judged.top_logprobs.shape == (len(hidden), 4)
    best = head.token_quantities(model, hidden, judged.top_ids[:, 3], heat, {"logprob"})["logprob"]
    assert torch.equal(judged.top_logprobs[:, 3], best)
    none = head.judge(model, torch.zeros(1, 48), targets[:1], heat[:1], 4)
    assert none.top_ids.tolist() == [[0, 1, 2, 3]]
