"""Quantities of a trained model and of its teachers at the weighted tokens of a micro-batch.

Shapes: T tokens of a text, M weighted tokens of a micro-batch, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import torch

from sparring.batch.tensors import MicroBatch
from sparring.generation import ScoreRequest, Scores
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.divergence import from_teacher, from_tops
from sparring.model.head import TargetRows, score_tokens, token_quantities
from sparring.protocols import Divergence
from sparring.train.average import Average


class Quantities:
    """Quantities of a model and of its teachers.

    Args:
        teachers: models that are computed without gradients, by name; for a moving average, the model that stores it.
    """

    def __init__(
        self, model: CausalModel, teachers: Mapping[str, CausalModel | Average], divergence: Divergence | None = None
    ) -> None:
        self._model, self._divergence = model, divergence
        self._teachers = {
            name: teacher.model if isinstance(teacher, Average) else teacher for name, teacher in teachers.items()
        }

    def __call__(self, micro: MicroBatch, needs: Set[str]) -> dict[str, torch.Tensor]:
        """Compute the named quantities, [M] each; with a graph if gradients are on."""
        layout = Packed(micro.cu_seqlens, micro.shared)
        hidden = self._model.hidden(micro.tokens, micro.positions, layout, micro.predicting)
        target_rows = TargetRows(micro.targets, micro.temperature, micro.kept, micro.bias)
        own = needs - {"divergence", "teacher"}
        quantities = token_quantities(
            self._model, hidden, target_rows.targets, target_rows.temperature, own, target_rows.kept, target_rows.bias
        )
        if "divergence" in needs and self._divergence is not None:
            quantities["divergence"] = self._teacher_divergence(micro, hidden, target_rows, self._divergence)
        if "teacher" in needs:
            quantities["teacher"] = self._teacher_logprobs(micro, target_rows)
        return quantities

    @torch.no_grad()
    def score(self, teacher: str, request: ScoreRequest, version: int) -> Scores:
        """Score given tokens under a teacher; `version` is the version of the trained model."""
        model, count = self._teachers[teacher], len(request.tokens) - 1
        tokens, places = torch.tensor(request.tokens, device=model.device), torch.arange(count, device=model.device)
        layout = Packed(torch.tensor([0, count], dtype=torch.int32, device=model.device))
        hidden = model.hidden(tokens[:-1], places, layout, places[request.first - 1 :])
        temperature = torch.full((len(hidden),), request.temperature, device=model.device)
        scores = score_tokens(model, hidden, tokens[request.first :], temperature, request.top_k)
        return Scores(
            logprobs=tuple(scores.logprob.tolist()),
            entropies=tuple(scores.entropy.tolist()),
            top_ids=tuple(map(tuple, scores.top_ids.tolist())),
            top_logprobs=tuple(map(tuple, scores.top_logprobs.tolist())),
            version=version,
        )

    def _teacher_divergence(
        self, micro: MicroBatch, hidden: torch.Tensor, target_rows: TargetRows, form: Divergence
    ) -> torch.Tensor:
        """Compute the divergence [M] of the model, with output `hidden` [M, D], from each token's teacher. The
        divergence is 0 at tokens without a teacher."""
        if form.over == "top_k":
            if micro.tops is None:
                raise ValueError("expected rows with a teacher's top-k tokens, got none; run its annotator first")
            return from_tops(self._model, hidden, micro.temperature, micro.tops, form)
        divergence = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for mask, teacher, output in self._teacher_outputs(micro):
            divergence = divergence.index_put(
                (mask,), from_teacher(self._model, hidden[mask], teacher, output, target_rows.select(mask), form)
            )
        return divergence

    @torch.no_grad()
    def _teacher_logprobs(self, micro: MicroBatch, target_rows: TargetRows) -> torch.Tensor:
        """Compute each token's log-probability [M] under its teacher, with the temperature, kept set and biases of its
        sampling. The value is 0 at tokens without a teacher."""
        logprobs = torch.zeros_like(micro.temperature)
        for mask, teacher, output in self._teacher_outputs(micro):
            logprobs[mask] = token_quantities(
                teacher, output, *target_rows.select(mask)[:2], {"logprob"}, *target_rows.select(mask)[2:]
            )["logprob"]
        return logprobs

    def _teacher_outputs(self, micro: MicroBatch) -> Iterator[tuple[torch.Tensor, CausalModel, torch.Tensor]]:
        """Yield for each teacher that rows name the mask [M] of the rows' tokens, the teacher's model, and its output
        at these tokens."""
        layout = Packed(micro.cu_seqlens, micro.shared)
        for name, mask in micro.teachers.items():
            teacher = self._teachers[name]
            with torch.no_grad():
                output = teacher.hidden(micro.tokens, micro.positions, layout, micro.predicting[mask])
            yield mask, teacher, output
