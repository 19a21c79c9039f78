"""Recurrent layers in the packed forward of training: each sequence alone with its state, whatever lies beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.batch.prefixes import lay_out
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]

LENGTHS = (17, 5, 17, 1, 40)

families = pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"])


def fast(folder: Path, family: str, *, gradient_checkpointing: bool = False) -> CausalModel:
    path = folder / family if (folder / family).exists() else tiny_model(family, folder / family, seed=9)
    return load(path, numerics="fast", gradient_checkpointing=gradient_checkpointing)


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def logits(model: CausalModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return list(model.logits(model.hidden(torch.cat(sequences), positions, Packed.of(lengths))).split(lengths))


def gradients(model: CausalModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(model.module.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: torch.zeros(()) if one is None else one for name, one in zip(parameters, found, strict=True)}


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to rounding, as a whole: what another sequence's state does is of the order of the values themselves."""
    return bool((found - expected).norm() <= 1e-3 * expected.norm() + 1e-6)


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    return sum(output.log_softmax(-1)[:, 7].mean() for output in outputs)


@families
def test_packed_sequences_have_the_logits_they_have_alone(tmp_path: Path, family: str) -> None:
    model = fast(tmp_path, family)
    with torch.no_grad():
        for together, row in zip(logits(model, rows()), rows(), strict=True):
            assert near(together, logits(model, [row])[0])


@families
def test_no_sequence_reaches_another(tmp_path: Path, family: str) -> None:
    """Exactly nothing of a sequence's logits hangs on another one's tokens; all of them hang on its own first token."""
    model, embedded = fast(tmp_path, family), []
    embedding = model.module.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, _tokens, output: embedded.append(output))
    outputs = logits(model, rows())
    for index, output in enumerate(outputs):
        reached = torch.autograd.grad(output[-1].square().sum(), embedded[0], retain_graph=True)[0][0].abs().sum(-1)
        for other, pull in enumerate(reached.split(LENGTHS)):
            assert bool((pull > 0).all()) if other == index else bool((pull == 0).all())


def test_another_first_sequence_changes_no_bit_of_the_second(tmp_path: Path) -> None:
    """Where no experts are chosen, so that every operation keeps its shape."""
    model = fast(tmp_path, "qwen3_5_text")
    changed = [(rows()[0] + 1) % VOCABULARY, *rows()[1:]]
    with torch.no_grad():
        before, after = logits(model, rows()), logits(model, changed)
    assert not torch.equal(before[0], after[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))


@families
def test_gradients_are_those_of_each_sequence_alone(tmp_path: Path, family: str) -> None:
    model = fast(tmp_path, family)
    together = gradients(model, loss_of(logits(model, rows())))
    alone = [gradients(model, loss_of(logits(model, [row]))) for row in rows()]
    assert (
        together["model.layers.0." + ("mixer" if family == "nemotron_h" else "linear_attn") + ".A_log"].abs().min() > 0
    )
    for name, found in together.items():
        assert near(found, sum(one[name] for one in alone)), name


@families
def test_recomputed_layers_have_the_same_gradients(tmp_path: Path, family: str) -> None:
    plain, recomputing = fast(tmp_path, family), fast(tmp_path, family, gradient_checkpointing=True)
    expected = gradients(plain, loss_of(logits(plain, rows())))
    for name, found in gradients(recomputing, loss_of(logits(recomputing, rows()))).items():
        assert torch.equal(found, expected[name])


@families
def test_a_tree_of_prefixes_has_the_logits_of_its_sequences(tmp_path: Path, family: str) -> None:
    """A prefix is laid out once; each sequence that begins with it gets the state behind it."""
    model, header = fast(tmp_path, family), rows()[4]
    sequences = [torch.cat([header[:kept], row]) for kept, row in zip((40, 40, 22, 0, 9), rows(), strict=True)]
    layout = lay_out([sequence.numpy() for sequence in sequences])
    assert len(layout.tokens) < sum(map(len, sequences))
    where = Packed(*(torch.from_numpy(values) for values in (layout.cu_seqlens, layout.shared)))
    found = model.logits(
        model.hidden(*(torch.from_numpy(values) for values in (layout.tokens, layout.positions)), where)
    )
    outputs = [found[torch.from_numpy(np.asarray(path))] for path in layout.paths]
    for output, sequence in zip(outputs, sequences, strict=True):
        assert near(output, logits(model, [sequence])[0])
    expected = gradients(model, loss_of(logits(model, sequences)))
    for name, gradient in gradients(model, loss_of(outputs)).items():
        assert near(gradient, expected[name]), name
