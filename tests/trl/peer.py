"""What TRL makes of a few preferences: its batch, its loss, its gradients. Run with the peer's own Python.

    .venv-trl/bin/python tests/trl/peer.py SPEC.json

SPEC names the algorithm and its settings, the folders of model and reference, the rows, and where the gradients go.
Prints the batch as rows of tokens, with which of them are the reply's, and the loss.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "simpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
}


def of_masks(ids: torch.Tensor, reply: torch.Tensor, there: torch.Tensor) -> list[dict[str, Any]]:
    """Rows of a padded batch."""
    return [
        {"tokens": row[mask.bool()].tolist(), "ours": ours[mask.bool()].bool().tolist()}
        for row, ours, mask in zip(ids, reply, there, strict=True)
    ]


def batch_of(name: str, batch: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Chosen and rejected rows; of KTO also the mismatched ones, in the order of the others."""
    if name == "kto":
        rows = of_masks(batch["input_ids"], batch["completion_mask"], batch["attention_mask"])
        others = of_masks(batch["KL_input_ids"], batch["KL_completion_mask"], batch["KL_attention_mask"])
        wanted = [bool(label) for label in batch["label"]]
        sides = {
            side: [r for r, w in zip(rows, wanted, strict=True) if w == (side == "chosen")]
            for side in ("chosen", "rejected")
        }
        return {**sides, "mismatched": others}
    if name == "dpo":
        rows = of_masks(batch["input_ids"], batch["completion_mask"], batch["attention_mask"])
        return {"chosen": rows[: len(rows) // 2], "rejected": rows[len(rows) // 2 :]}
    return {
        side: of_masks(batch[f"{side}_input_ids"], batch[f"{side}_labels"] != -100, batch[f"{side}_attention_mask"])
        for side in ("chosen", "rejected")
    }


def loss_of(name: str, trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The trainer's own. Of ORPO the odds ratio's part alone: its likelihood takes in the prompt, the paper's does
    not."""
    if name == "orpo":
        chosen, rejected = trainer.concatenated_forward(trainer.model, batch)[:2]
        return -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    return trainer.compute_loss(trainer.model, batch)


def main() -> None:
    """One batch, one backward pass."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    name = spec["name"]
    kind, config = TRAINERS[name]
    rows = spec["rows"]
    if name == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows
            for side in ("chosen", "rejected")
        ]
    arguments = config(
        output_dir=spec["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(rows),
        report_to="none",
        **spec["settings"],
    )
    model, reference = (
        AutoModelForCausalLM.from_pretrained(spec[which], dtype=torch.float32) for which in ("model", "reference")
    )
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    others = {"ref_model": reference} if name in ("dpo", "kto") else {}
    trainer = kind(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **others
    )
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    loss = loss_of(name, trainer, batch)
    loss.backward()
    save_file(
        {n: p.grad.contiguous() for n, p in trainer.model.named_parameters() if p.grad is not None}, spec["gradients"]
    )
    print(json.dumps({"loss": loss.item(), **batch_of(name, batch)}))


if __name__ == "__main__":
    main()
