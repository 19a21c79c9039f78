"""Reward model as a service of this process: token ids in, values out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sparring.batch.packing import pack
from sparring.batch.preference import CHOSEN, whole_text
from sparring.batch.tensors import micro_batch
from sparring.errors import EngineError, boundary
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.head import token_quantities
from sparring.model.padding import scored_part


class RewardModel:
    """Reward model on a thread of its own. Implements `ValueModel`. Texts are packed and computed by the trainer's
    module as in training: in exact numerics a text's value has the same bits in any batch and in training. The value is
    read at the same token as in transformers: padding at the end of a text does not count.

    Args:
        model: model with a scalar head, used by this object alone.
        token_budget: maximum number of distinct tokens computed at once.
        threads: CPU threads; 0 keeps torch's number.
    """

    def __init__(self, model: CausalModel, *, token_budget: int = 8192, threads: int = 0) -> None:
        self._model, self._budget = model, token_budget
        self._pad = model.module.config.get_text_config().pad_token_id
        count = threads or torch.get_num_threads()
        self._worker = ThreadPoolExecutor(1, "reward", initializer=torch.set_num_threads, initargs=(count,))

    async def values(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the value of each text: the head's output at the last token that is not padding. Common prompts of
        texts are computed once. Raises EngineError if a text is empty or has more tokens than the model has positions,
        or the model failed."""
        for text in texts:
            if not 0 < len(text) <= self._model.max_positions:
                length = f"{len(text)}; shorten it"
                raise EngineError(
                    f"reward model: expected a text of 1 to {self._model.max_positions} tokens, got {length}"
                )
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._worth, texts)

    async def close(self) -> None:
        """Finish pending calls and end the thread. Safe to call twice."""
        await asyncio.to_thread(self._worker.shutdown)

    @torch.no_grad()
    def _worth(self, texts: Sequence[Sequence[int]]) -> list[float]:
        scored = [scored_part(text, self._pad) for text in texts]
        rows = [whole_text(text, id=str(index), group=str(index), label=CHOSEN) for index, text in enumerate(scored)]
        value_of: dict[str, float] = {}
        with boundary(EngineError, "reward model"):
            for packed in pack(rows, self._budget):
                micro = micro_batch(packed, {"preference": 1.0}, self._model.device)
                where = Packed(micro.cu_seqlens, micro.shared)
                hidden = self._model.hidden(micro.tokens, micro.positions, where, micro.predicting)
                values = token_quantities(self._model, hidden, micro.targets, micro.temperature, {"value"})["value"]
                value_of |= zip([row.id for row in packed], values.tolist(), strict=True)
        return [value_of[row.id] for row in rows]
