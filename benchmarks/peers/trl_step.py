"""GRPO steps of TRL's `GRPOTrainer` on the CPU, timed one by one. Run by benchmarks/rl_step.py with the peer's own
Python.

    .venv-trl/bin/python benchmarks/peers/trl_step.py SPEC.json

Computes one step for each line on its standard input and prints a JSON object for it: wall and CPU seconds, peak
memory.
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


class Turns(TrainerCallback):
    """Waits for a line on standard input before each step and prints what the step took after it.

    What lies between is a whole step: data, generation, reward, training, the optimiser.
    """

    def begin(self) -> None:
        """Wait for our turn."""
        sys.stdin.readline()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer before the first batch is generated."""
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer after the optimiser's step."""
        step_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"step_s": step_s, "cpu_s": cpu_s, "peak_rss_bytes": peak}), flush=True)
        self.begin()


def settings(spec: dict[str, Any], folder: str) -> GRPOConfig:
    """The same work as ours: nothing extra. "fastest" picks the options that only cost time here, "defaults" leaves
    them."""
    faster = {"gradient_checkpointing": False, "cache_implementation": "static"} if spec["peer"] == "fastest" else {}
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
        max_steps=spec["warmup"] + spec["steps"],
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **faster,
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
        assert {len(ids) for ids in completion_ids} == {spec["new_tokens"]}, (
            "every completion must have the full length"
        )
        return [zlib.crc32(array("q", ids).tobytes()) / 2**32 for ids in completion_ids]

    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=reward,
        args=settings(spec, f"{spec['folder']}/trl"),
        train_dataset=Dataset.from_list([{"prompt": prompt["text"]} for prompt in spec["prompts"]]),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.lm_head.weight), "training must have changed the weights"


if __name__ == "__main__":
    main()
