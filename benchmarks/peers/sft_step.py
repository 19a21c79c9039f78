"""Forward and backward of supervised fine-tuning with padded rows, timed step by step. Run by benchmarks/train.py with
the peer's own Python.

    .venv-trl/bin/python benchmarks/peers/sft_step.py trl|loop SPEC.json

`trl` is TRL's `SFTTrainer`, `loop` a plain loop over a `transformers` model. Each computes the gradients of one batch
for each line on its standard input and prints a JSON object for it: wall and CPU seconds, the loss, peak memory.
Weights stay as they are.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock:
    """Waits for its turn, then takes the time."""

    def begin(self) -> None:
        """Wait for a line on standard input."""
        sys.stdin.readline()
        self.loss, self._wall, self._cpu = 0.0, time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Print what lay between."""
        seconds = {"seconds": time.perf_counter() - self._wall, "cpu_s": time.process_time() - self._cpu}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({**seconds, "loss": self.loss, "peak_rss_bytes": peak}), flush=True)


class Turns(TrainerCallback):
    """From the first micro-batch, which is already padded, to the last gradient; data, clipping and optimiser lie
    outside."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer before the first micro-batch of a batch."""
        self._clock.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer when the gradients are there."""
        self._clock.end()


class Trainer(SFTTrainer):  # type: ignore[misc]
    """Tells the clock the loss."""

    clock: Clock

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """One micro-batch."""
        loss: torch.Tensor = super().training_step(*arguments, **named)
        self.clock.loss += loss.item()
        return loss


def train_with_trl(spec: dict[str, Any], clock: Clock) -> None:
    """The real trainer over all batches, without anything that only costs time here."""
    arguments = SFTConfig(
        output_dir=f"{spec['folder']}/trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=spec["peer_rows"],
        gradient_accumulation_steps=spec["rows"] // spec["peer_rows"],
        gradient_checkpointing=False,
        max_length=None,
        learning_rate=0.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=len(spec["batches"]),
        shuffle_dataset=False,
        train_sampling_strategy="sequential",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    Trainer.clock = clock
    rows = [{"input_ids": row} for batch in spec["batches"] for row in batch]
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    data = Dataset.from_list(rows)
    Trainer(spec["model"], arguments, train_dataset=data, processing_class=tokenizer, callbacks=[Turns(clock)]).train()


def train_in_a_loop(spec: dict[str, Any], clock: Clock) -> None:
    """What one writes by hand: pad some rows, forward, mean cross-entropy over the batch's tokens, backward."""
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).train()
    size = spec["peer_rows"]
    for batch in spec["batches"]:
        clock.begin()
        trained = sum(len(row) - 1 for row in batch)
        for part in (batch[at : at + size] for at in range(0, len(batch), size)):
            rows = [torch.tensor(row) for row in part]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
            logits = model(input_ids=tokens, attention_mask=(labels != -100).long(), use_cache=False).logits[:, :-1]
            loss = (
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                / trained
            )
            loss.backward()
            clock.loss += loss.item()
        clock.end()
        model.zero_grad()


def main() -> None:
    """Compute, time, print."""
    spec = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(spec["threads"])
    {"trl": train_with_trl, "loop": train_in_a_loop}[sys.argv[1]](spec, Clock())


if __name__ == "__main__":
    main()
