"""Quantities in chunks: the same bits for any chunking, with or without recomputation in the backward pass."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.errors import BadInput
from sparring.model import head
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.usefixtures("kernel_path")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3", tied=False)


def inputs(count):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 48, generator=generator, requires_grad=True)
    return hidden, torch.randint(VOCABULARY, (count,), generator=generator), torch.full((count,), 0.9)


def test_chunk_size_does_not_change_quantities(path):
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
        gradients.append(
            (hidden.grad, model.state()["lm_head.weight"], dict(model.module.named_parameters())["lm_head.weight"].grad)
        )
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][2], gradients[1][2])


def test_what_is_added_to_logits_is_added_in_every_chunk(path):
    model = load(path)
    count = head.CHUNK_ROWS + 3
    found = []
    for limit in (count * VOCABULARY, 0):
        hidden, targets, heat = inputs(count)
        rows = [
            [(7, -torch.inf), (5, 1.5), (VOCABULARY, 3.0), (-1, 2.0)] if n % 2 and targets[n] != 7 else []
            for n in range(count)
        ]
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


def test_only_needed_quantities_are_returned(path):
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
    judged = head.score_tokens(model, hidden, targets, heat, 4)
    assert torch.equal(judged.logprob, found["logprob"]) and torch.equal(judged.entropy, found["entropy"])
    assert judged.top_ids.shape == judged.top_logprobs.shape == (len(hidden), 4)
    best = head.token_quantities(model, hidden, judged.top_ids[:, 3], heat, {"logprob"})["logprob"]
    assert torch.equal(judged.top_logprobs[:, 3], best)
    none = head.score_tokens(model, torch.zeros(1, 48), targets[:1], heat[:1], 4)
    assert none.top_ids.tolist() == [[0, 1, 2, 3]]


WIDE = 32768


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.shape = torch.Size([0])

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.shape.numel():
                self.shape = tensor.shape
        return result


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model with many more tokens than width."""
    folder, init = (
        tmp_path_factory.mktemp("wide"),
        InitConfig(num_layers=1, hidden_size=16, intermediate_size=16, tie_embeddings=False),
    )
    return create(init, WIDE, folder, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_all_rows_never_exist_at_once(wide, dtype):
    model = load(wide, dtype=dtype)
    count = head.CHUNK_ELEMENTS // WIDE + 8
    hidden = torch.randn(count, 16, generator=torch.Generator().manual_seed(0)).to(model.dtype).requires_grad_()
    targets, heat = torch.arange(count) * 31 % WIDE, torch.full((count,), 0.9)
    gradients = []
    for keep, largest in ((0, head.CHUNK_ELEMENTS), (math.inf, None)):
        with Largest() as seen:
            found = head.token_quantities(model, hidden, targets, heat, {"logprob", "entropy"}, keep_elements=keep)
            loss = found["logprob"].sum() + found["entropy"].sum()
            gradients.append((found["logprob"], *torch.autograd.grad(loss, (hidden, model.head.weight))))
        assert largest is None or seen.shape.numel() <= largest, seen.shape
    assert torch.equal(gradients[0][0], gradients[1][0])
    for pieces, whole in zip(gradients[0][1:], gradients[1][1:], strict=True):
        assert pieces.dtype is whole.dtype
        distance = (pieces.double() - whole.double()).norm() / whole.double().norm()
        assert distance < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunk_of_another_size_shows_in_no_row(wide, dtype):
    model, size = load(wide, dtype=dtype), head.CHUNK_ELEMENTS // WIDE
    count = size + 5
    hidden = torch.randn(count, 16, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    targets, heat = torch.arange(count) * 31 % WIDE, torch.linspace(0.1, 2.0, count)
    sets = [sorted({int(target), 7, 8000, 32000}) if n % 3 else [] for n, target in enumerate(targets)]
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    kept = (offsets, torch.tensor([token for ids in sets for token in ids], dtype=torch.int32))
    added = [(7, 1.5)] * count
    bias = (torch.arange(count + 1), *(torch.tensor(column) for column in zip(*added, strict=True)))
    needs = {"logprob", "entropy"}
    with torch.no_grad():
        found = head.token_quantities(model, hidden, targets, heat, needs, kept, bias)
        for n in (0, size - 1, size, count - 1):
            own = (
                (torch.tensor([0, len(sets[n])]), torch.tensor(sets[n], dtype=torch.int32)),
                tuple(t[:1] for t in bias[1:]),
            )
            row = slice(n, n + 1)
            alone = head.token_quantities(
                model, hidden[row], targets[row], heat[row], needs, own[0], (torch.tensor([0, 1]), *own[1])
            )
            assert all(torch.equal(alone[name], found[name][row]) for name in needs)


def test_squares_of_probabilities_are_over_the_kept_ids(path):
    """Against the definition in float64; what was sampled greedily counts at temperature 1."""
    model = load(path)
    hidden, targets, _ = inputs(head.CHUNK_ROWS + 3)
    heat = torch.linspace(0.0, 2.0, len(targets))
    kept_ids = [sorted({int(target), 3, 9}) if n % 2 else [] for n, target in enumerate(targets)]
    kept = (
        torch.tensor([0, *map(len, kept_ids)]).cumsum(0),
        torch.tensor([id for of in kept_ids for id in of], dtype=torch.int32),
    )
    for sets in (None, kept):
        found = head.token_quantities(model, hidden, targets, heat, {"probability_squares", "logprob"}, sets)
        assert not found["probability_squares"].requires_grad and found["logprob"].requires_grad
        logits = model.logits(hidden).detach().double() / torch.where(heat == 0, 1.0, heat).double()[:, None]
        for n, ids in enumerate(kept_ids):
            row = logits[n][ids] if ids and sets is not None else logits[n]
            assert found["probability_squares"][n].item() == pytest.approx(
                row.softmax(0).square().sum().item(), rel=1e-5
            )
