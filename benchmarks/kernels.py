"""Compiled kernels against torch's own operations, in turns, medians. The last line is one JSON object with `claims`.

Usage: python benchmarks/kernels.py [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common.figures import read_options

from sparring.kernels import ops

SHAPES = ((256, 256), (256, 768), (768, 256), (256, 4096), (1024, 3072))
"""(inputs, outputs): the layers of a 7M-parameter model, and one of a 0.6B model."""
TRAINED_SHAPES = ((160, 480), (160, 960), (480, 160), (160, 1000), (256, 1536), (768, 256))
"""(inputs, outputs) in training: the quickstart's joined layers and head, and the joined layers of a 7M-parameter
model."""
TRAINED_ROWS = 4096


def in_turns(*calls: Callable[[], object], rounds: int = 9, slice_s: float = 0.02) -> list[float]:
    """Median seconds of one call of each, measured alternately so that all see the same machine."""
    repeats = []
    for call in calls:
        call()
        begin = time.perf_counter()
        call()
        repeats.append(max(1, int(slice_s / max(time.perf_counter() - begin, 1e-7))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for index, call in enumerate(calls):
            begin = time.perf_counter()
            for _ in range(repeats[index]):
                call()
            samples[index].append((time.perf_counter() - begin) / repeats[index])
    return [statistics.median(s) for s in samples]


def linear_speedup(rows: int, dtype: torch.dtype, report: dict[str, float]) -> float:
    """Geometric mean over SHAPES of time(F.linear) / time(ours)."""
    ratios = []
    for inputs, outputs in SHAPES:
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        packed = ops.pack(weight)
        ours, theirs = in_turns(lambda: ops.linear(x, packed), lambda: F.linear(x, weight))
        report[f"linear {ops.path_name()} {dtype} {rows}x{inputs}x{outputs} us"] = round(ours * 1e6, 1)
        report[f"linear {dtype} {rows}x{inputs}x{outputs} torch us"] = round(theirs * 1e6, 1)
        ratios.append(theirs / ours)
    return math.exp(statistics.fmean(map(math.log, ratios)))


def linear_training_speedup(report: dict[str, float]) -> float:
    """Geometric mean over TRAINED_SHAPES of time(F.linear) / time(ours), forward and both gradients, float32."""
    ratios = []
    for inputs, outputs in TRAINED_SHAPES:
        x, weight = (torch.randn(n, inputs, requires_grad=True) for n in (TRAINED_ROWS, outputs))
        packed, slope = ops.pack(weight), torch.randn(TRAINED_ROWS, outputs)
        mine, other = in_turns(
            lambda: torch.autograd.grad(ops.linear(x, packed), (x, weight), slope),
            lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), slope),
        )
        report[f"linear {ops.path_name()} forward and backward {TRAINED_ROWS}x{inputs}x{outputs} us"] = mine * 1e6
        report[f"linear forward and backward {TRAINED_ROWS}x{inputs}x{outputs} torch us"] = other * 1e6
        ratios.append(other / mine)
    return math.exp(statistics.fmean(map(math.log, ratios)))


def attention_training(report: dict[str, float]) -> float:
    """time(torch, sequence by sequence) / time(ours), forward and backward of 16 packed sequences of 128 tokens."""
    count, length, heads, groups, size = 16, 128, 4, 2, 64
    form = ops.AttentionForm(0.125)
    q, k, v = (torch.randn(count * length, n, size, requires_grad=True) for n in (heads, groups, groups))
    offsets = torch.arange(count + 1, dtype=torch.int32) * length

    def ours() -> None:
        ops.attention_packed(q, k, v, offsets, form).sum().backward()

    def theirs() -> None:
        a, b, c = (t.view(count, length, -1, size).transpose(1, 2) for t in (q, k, v))
        F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.125, enable_gqa=True).sum().backward()

    mine, other = in_turns(ours, theirs)
    report["attention 16x128 forward and backward us"], report["attention 16x128 torch us"] = mine * 1e6, other * 1e6
    return other / mine


def attention_decoding(batch: int, context: int, report: dict[str, float]) -> float:
    """time(torch on keys that lie contiguous already) / time(ours on pages), one new token for each of `batch`
    sequences."""
    heads, groups, size, page_size = 4, 2, 64, 16
    form = ops.AttentionForm(0.125)
    per_sequence = context // page_size
    kept = ops.KvHeads.uniform(1, groups, size)
    pages = ops.KvPages(kept, num_pages=batch * per_sequence, page_size=page_size, dtype=torch.float32)
    tables = torch.randperm(batch * per_sequence).view(batch, -1).to(torch.int32)
    rows = ops.PagedRows(
        tables, torch.arange(batch + 1, dtype=torch.int32), torch.full((batch,), context, dtype=torch.int32)
    )
    q, k, v = (torch.randn(batch, n, size) for n in (heads, groups, groups))
    past_k, past_v = (torch.randn(batch, groups, context, size) for _ in range(2))
    query = q.view(batch, heads, 1, size)
    mine, other = in_turns(
        lambda: ops.attention_paged(q, k, v, pages, 0, rows, form),
        lambda: F.scaled_dot_product_attention(query, past_k, past_v, scale=0.125, enable_gqa=True),
    )
    report[f"paged attention {batch}x{context} us"] = mine * 1e6
    report[f"paged attention {batch}x{context} torch us"] = other * 1e6
    return other / mine


def small_operation_us() -> float:
    """Worst median time of one small operation without gradients, in microseconds: what a decode step pays per call."""
    x, weight, heads = torch.randn(4, 256), torch.randn(256), torch.randn(4, 4, 64)
    angle = torch.randn(4, 64)
    calls = (
        lambda: ops.rms_norm(x, weight, 1e-6),
        lambda: ops.silu_mul(x, x),
        lambda: ops.rope(heads, angle, angle),
    )
    return max(in_turns(*calls)) * 1e6


def logprobs_speedup(report: dict[str, float]) -> float:
    """time(log_softmax, gather, entropy and their gradient) / time(ours) for 1024 rows of 4096."""
    logits = torch.randn(1024, 4096, requires_grad=True)
    targets, temperature = torch.randint(0, 4096, (1024,)), torch.ones(1024)

    def theirs() -> None:
        log_p = torch.log_softmax(logits, 1)
        (log_p.gather(1, targets.unsqueeze(1)).sum() - (log_p * log_p.exp()).sum()).backward()

    def ours() -> None:
        logprob, entropy = ops.token_logprobs(logits, targets, temperature)
        (logprob.sum() + entropy.sum()).backward()

    mine, other = in_turns(ours, theirs)
    report["token_logprobs 1024x4096 ms"], report["token_logprobs torch ms"] = mine * 1e3, other * 1e3
    return other / mine


def main() -> None:
    """Measure, print a report, then the claims."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(read_options(parser).threads)
    report: dict[str, float] = {}
    claims: list[dict[str, object]] = []

    def claim(name: str, value: float, unit: str, target: float, direction: str = ">=") -> None:
        claims.append({"name": name, "value": round(value, 3), "unit": unit, "target": target, "direction": direction})

    best, *others = (name for name in ops.path_names() if name != "exact-torch")
    for path in (*others, best):
        ops.use(path)
        label = path.removeprefix("exact-")
        with torch.no_grad():
            for rows, target in ((1, 1.0), (8, 1.0), (32, 1.0), (128, 0.9), (512, 0.8), (2048, 0.8)):
                claim(
                    f"linear_float32_{rows}_rows_{label}_vs_torch",
                    linear_speedup(rows, torch.float32, report),
                    "x",
                    target,
                )
        claim(
            f"linear_float32_training_{label}_vs_torch",
            linear_training_speedup(report),
            "x",
            1.2 if path == "exact-tiles" else 0.8,
        )
    with torch.no_grad():
        for rows in (1, 32, 512):
            claim(f"linear_bfloat16_{rows}_rows_vs_torch", linear_speedup(rows, torch.bfloat16, report), "x", 0.8)
        claim("paged_attention_vs_torch_contiguous", attention_decoding(32, 256, report), "x", 1.0)
        claim("small_operation", small_operation_us(), "us", 6.0, "<=")
    claim("packed_attention_training_vs_torch", attention_training(report), "x", 1.0)
    claim("token_logprobs_vs_torch", logprobs_speedup(report), "x", 1.0)
    for name, value in report.items():
        sys.stdout.write(f"{name}: {value:.1f}\n")
    sys.stdout.write(json.dumps({"path": ops.path_name(), "threads": torch.get_num_threads(), "claims": claims}) + "\n")


if __name__ == "__main__":
    main()
