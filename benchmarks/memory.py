"""How much memory a run is said to hold (`sparring check`) over how much it really holds at its peak.

    python benchmarks/memory.py [--cases rl,lora,...] [--large]

Each case is a model of a published shape with random weights and a recipe of one or two updates, which `sparring run`
runs in a process of its own. Said is what the run's own check prints; measured is the process's largest resident set
(`ru_maxrss`). What is said should be 0.8 to 1.3 times what is measured. `--large` adds
Qwen3-0.6B in bfloat16, which needs 18 GB. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.figures import Claims, claim, read_options

LEAST, MOST = 0.8, 1.3
SMOLLM2_135M = (
    "llama",
    {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
)
SMOLLM2_360M = (
    "llama",
    {
        "hidden_size": 960,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "intermediate_size": 2560,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
)
GPT2 = ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024})
GEMMA3_270M = (
    "gemma3_text",
    {
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 2048,
        "vocab_size": 262144,
    },
)
PYTHIA_160M = (
    "gpt_neox",
    {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 50304,
    },
)
EXPERTS_150M = (
    "qwen3_moe",
    {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 32000,
    },
)
QWEN3_600M = (
    "qwen3",
    {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
)
"""Families and shapes as their publishers have them; EXPERTS_150M is a small Qwen3-MoE."""

COLOCATED = {"cluster": {"colocate": True}}
RL = {"groups_per_step": 4, "steps": 2, "train": {"save_every": 0}}
WIDE = {"policy": {"dtype": "bfloat16"}}
CASES: dict[str, tuple[tuple[str, dict[str, Any]], str, dict[str, Any]]] = {
    "rl": (SMOLLM2_135M, "float32", {}),
    "rl bfloat16": (SMOLLM2_135M, "bfloat16", {}),
    "rl colocated": (SMOLLM2_135M, "float32", COLOCATED),
    "rl colocated bfloat16": (SMOLLM2_135M, "bfloat16", COLOCATED),
    "rl 8x8": (SMOLLM2_135M, "float32", {"rl": {**RL, "groups_per_step": 8}, "engine": {}}),
    "rl 8x8 bfloat16": (SMOLLM2_135M, "bfloat16", {"rl": {**RL, "groups_per_step": 8}, "engine": {}}),
    "rl checkpointing": (SMOLLM2_360M, "bfloat16", {"policy": {"gradient_checkpointing": True}}),
    "rl lora": (SMOLLM2_360M, "bfloat16", {"policy": {"lora": {"rank": 16}}}),
    "rl critic": (SMOLLM2_135M, "bfloat16", {"algo": {"preset": "ppo"}, "rl": {**RL, "critic": {"model": "policy"}}}),
    "rl reference": (SMOLLM2_135M, "float32", {"algo": {"kl": {"coefficient": 0.1}}}),
    "rl experts": (EXPERTS_150M, "bfloat16", {}),
    "distill": (
        SMOLLM2_135M,
        "bfloat16",
        {
            "stages": ["distill"],
            "distill": {"steps": 2, "groups_per_step": 4, "teachers": {"*": "teacher"}, "over": "vocabulary"},
        },
    ),
    "sft": (GPT2, "float32", {"stages": ["sft"]}),
    "sft checkpointing": (GEMMA3_270M, "bfloat16", {"stages": ["sft"], "policy": {"gradient_checkpointing": True}}),
    "preference": (PYTHIA_160M, "bfloat16", {"stages": ["preference"]}),
}
LARGE = {
    "rl 0.6B": (QWEN3_600M, "bfloat16", {"policy": {"gradient_checkpointing": True}, "train": {"token_budget": 768}})
}

WORLD = '''
import zlib
from array import array

from sparring.envs.base import Env
from sparring.types import Score


class Digits(Env):
    """Any answer is worth something that depends on its ids."""

    def generate(self, random):
        return {"prompt": "".join(random.choice("0123456789") for _ in range(40)), "answer": "1"}

    async def score(self, trajectory):
        last = trajectory.segments[-1]
        tokens = last.tokens if last.source == "policy" else ()
        return Score(reward=zlib.crc32(array("q", tokens).tobytes()) / 2**32 if len(tokens) > 20 else 0.0)
'''


def make(folder: Path, family: str, shape: dict[str, Any], dtype: str) -> None:
    """Write a checkpoint of random weights, with a small tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig

    from sparring.model.library import class_of
    from sparring.render.train_tokenizer import train_tokenizer

    train_tokenizer(["user assistant system"], 512, folder)
    ids = {
        name: Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(f"<|{name}|>")
        for name in ("im_end", "endoftext")
    }
    positions = {} if family == "gpt2" else {"max_position_embeddings": 1024}
    special = {"eos_token_id": ids["im_end"], "pad_token_id": ids["endoftext"], "bos_token_id": None}
    config = AutoConfig.for_model(family, **shape, **positions, **special)
    torch.manual_seed(0)
    class_of(config).from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def rows(folder: Path) -> None:
    """Conversations to imitate, and compared replies."""
    texts = [" ".join(str(number * place % 97) for place in range(60)) for number in range(1, 65)]
    talks = [
        {"messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": text}]} for text in texts
    ]
    pairs = [{"prompt": f"{text[:20]}?", "chosen": text, "rejected": text[::-1]} for text in texts]
    for name, every in (("talks", talks), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in every))
    (folder / "world.py").write_text(WORLD)


def recipe(folder: Path, name: str, dtype: str, asked: dict[str, Any]) -> Path:
    """The recipe of a case as a file."""
    import tomli_w

    models: dict[str, Any] = {"policy": {"path": str(folder / "model"), "dtype": dtype, **asked.get("policy", {})}}
    if name == "distill":
        models["teacher"] = {"path": str(folder / "teacher"), "dtype": dtype}
    document: dict[str, Any] = {
        "run": {"name": "run", "directory": str(folder / "runs"), "stages": asked.get("stages", ["rl"])},
        "models": models,
        "env": {"name": f"{folder / 'world.py'}:Digits"},
        "rollout": {
            "group_size": 8,
            "sampling": {"max_turn_tokens": 64, "min_turn_tokens": 0 if name == "distill" else 64},
        },
        "engine": asked.get("engine", {"kv": {"tokens": 2048}, "batch": {"max_running": 32, "max_tokens": 1024}}),
        "train": asked.get("train", {"token_budget": 1024}),
        "rl": asked.get("rl", RL),
        "sft": {"steps": 2, "rows_per_step": 16, "data": str(folder / "talks.jsonl")},
        "preference": {"steps": 2, "rows_per_step": 8, "data": str(folder / "pairs.jsonl")},
        **{section: asked[section] for section in ("algo", "cluster", "distill") if section in asked},
    }
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(document))
    return path


def measure(
    name: str, model: tuple[str, dict[str, Any]], dtype: str, asked: dict[str, Any], *, short: bool
) -> dict[str, Any]:
    """Said and measured bytes of one case; of models with two layers if `short`."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        rows(folder)
        for part, (family, shape) in {
            "model": model,
            **({"teacher": SMOLLM2_360M} if name == "distill" else {}),
        }.items():
            if short:
                shape = {**shape, "n_layer" if "n_layer" in shape else "num_hidden_layers": 2}
            command = [sys.executable, __file__, "--make", family, json.dumps(shape), dtype, str(folder / part)]
            subprocess.run(command, check=True, capture_output=True)
        command = [sys.executable, "-m", "sparring.cli.main", "run", str(recipe(folder, name, dtype, asked))]
        began = time.perf_counter()
        with (folder / "log").open("w") as log:
            run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(run.pid, 0)
        text = (folder / "log").read_text()
        assert status == 0, text
        said = re.search(r"memory: about ([\d.]+) GiB.* for ([\d.]+) million", text)
        assert said is not None, text
    gib = used.ru_maxrss / 2**20
    figures = {"said_gib": float(said[1]), "measured_gib": round(gib, 2), "ratio": round(float(said[1]) / gib, 3)}
    return {**figures, "million_parameters": float(said[2]), "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Measure and print; or make one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--large", action="store_true", help="also Qwen3-0.6B")
    parser.add_argument("--make", nargs=4, help="of one model: family, shape, dtype, folder")
    arguments = read_options(parser, cases="rl")
    if arguments.make:
        family, shape, dtype, folder = arguments.make
        make(Path(folder), family, json.loads(shape), dtype)
        return
    cases = {name: CASES[name] for name in arguments.cases.split(",") if name} | (LARGE if arguments.large else {})
    claims: Claims = []
    for name, case in cases.items():
        found = measure(name, *case, short=arguments.short)
        print(name, json.dumps(found), flush=True)
        for bound, direction in ((LEAST, ">="), (MOST, "<=")):
            claims.append(claim(f"said over measured: {name}", found["ratio"], "x", bound, direction))
    print(json.dumps({"benchmark": "memory", "claims": claims}))


if __name__ == "__main__":
    main()
