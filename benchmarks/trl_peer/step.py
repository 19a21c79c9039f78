"""GRPO steps of TRL's `GRPOTrainer` on the CPU, timed. Run by benchmarks/rl_step.py with the peer's own Python.

    .venv-trl/bin/python benchmarks/trl_peer/step.py SPEC.json

Prints one JSON object as its last line: seconds of each measured step and the peak of the resident memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import zlib
from array import array
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """When each optimiser step ended, by the wall clock and in CPU seconds. What lies between two ends is a whole step: data, generation, reward, training."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer."""
        self.ends.append((time.perf_counter(), time.process_time()))


def settings(spec: dict[str, Any], folder: str) -> GRPOConfig:
    """The same work as ours: nothing extra, and of TRL's options the ones that are fastest here."""
    rows = spec["groups_per_step"] * spec["group_size"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=spec["group_size"],
        max_completion_length=spec["new_tokens"],
        generation_kwargs={"min_new_tokens": spec["new_tokens"]},
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        cache_implementation="static",
        max_steps=spec["warmup"] + spec["steps"],
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )


def main() -> None:
    """Train, time, print."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    for prompt in spec["prompts"]:
        assert tokenizer(prompt["text"])["input_ids"] == prompt["tokens"], "the prompts must be equal to the token"

    def reward(completion_ids: list[list[int]], **rest: Any) -> list[float]:
        """Arbitrary, but a function of the completion: what ours uses."""
        assert {len(ids) for ids in completion_ids} == {spec["new_tokens"]}, "every completion must have the full length"
        return [zlib.crc32(array("q", ids).tobytes()) / 2**32 for ids in completion_ids]

    times = StepTimes()
    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=settings(spec, f"{spec['folder']}/trl"),
        train_dataset=Dataset.from_list([{"prompt": prompt["text"]} for prompt in spec["prompts"]]),
        processing_class=tokenizer,
        callbacks=[times],
    )
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.lm_head.weight), "training must have changed the weights"
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(times.ends, times.ends[1:], strict=False)][-spec["steps"] :]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"step_s": [s for s, _ in steps], "cpu_s": [c for _, c in steps], "peak_rss_bytes": peak}))


if __name__ == "__main__":
    main()
