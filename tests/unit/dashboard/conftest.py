"""A run's folder as a real run leaves it, made through the real types and the real store, with hostile text in it."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rollouts import LOST, make_rollout
from segments import sampled
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from sparring.generation import Runs
from sparring.store.sqlite import SqliteStore
from sparring.types import Failure, Fork, Group, Message, Rollout, Score, Segment, Task, Timing, Usage

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
DATASETS = ("basic_arithmetic", "gcd", "base_conversion", "letter_counting")
STEPS = 60
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(12 * 7)"}}\n</tool_call>'
CONFIG = """
[run]
name = "sample"
stages = ["sft", "rl"]
device = "cpu"
seed = 3

[env]
name = "reasoning_gym"
"""


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=420, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["print(12 * 7)", "What is the answer to the question?", "assistant tool user"] * 8, trainer
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


class _Maker:
    """Makes groups of two-turn rollouts with a tool call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(7)

    def segment(self, index: int, source: str, role: str, text: str, version: int) -> Segment:
        tokens = tuple(self.tokenizer.encode(f"<|im_start|>{role}\n{text}<|im_end|>\n").ids)
        parent, message = index - 1 if index else None, Message(role=role, content=text)
        if source != "policy":
            return Segment(index=index, parent=parent, source=source, tokens=tokens, message=message)
        logprobs = tuple(-self.random.expovariate(3.0) for _ in tokens)
        read_by = Runs.of(max(0, version - index // 3), len(tokens))
        more = {"message": message, "logprobs": logprobs, "kv_versions": read_by}
        return sampled(index, parent, tokens, version=version, **more)

    def rollout(self, task: Task, group: str, index: int, version: int, solved: bool) -> Rollout:
        answer = "84" if solved else "The café has 83 ☕"
        segments = (
            self.segment(0, "prompt", "system", "Use the tool `python` to compute, then answer.", version),
            self.segment(1, "prompt", "user", f"What is 12 * 7? {HOSTILE}", version),
            self.segment(2, "policy", "assistant", CALL, version),
            self.segment(3, "tool", "tool", "84\n", version),
            self.segment(4, "policy", "assistant", answer, version + (index == 1)),
            replace(
                self.segment(5, "prompt", "user", "Answer with a title.", version),
                parent=None,
                fork=Fork(reason="auxiliary", agent="titles"),
                quotes=(4,),
            ),
            replace(self.segment(6, "policy", "assistant", "a sum", version), label="auxiliary"),
        )
        count = sum(len(s.tokens) for s in segments if s.model)
        more = {"usage": Usage(sampled_tokens=count, turns=2, tool_calls=1), "timing": Timing(wall_s=0.4)}
        return make_rollout(task, f"{group}/{index}", segments, index=index, **more)

    def failed(self, task: Task, group: str, index: int) -> Rollout:
        failure = Failure(error="SandboxError", where="box", message="the host died " + HOSTILE)
        return make_rollout(task, f"{group}/{index}", index=index, attempt=2, outcome=replace(LOST, failure=failure))

    def group(self, number: int, version: int, tag: str, rate: float) -> Group:
        task = Task(id=f"{tag}:{number}", env="reasoning_gym", messages=(), tag=tag, seed=number)
        name = f"rl/{number}"
        solved = [self.random.random() < rate for _ in range(4)]
        return Group(
            id=name,
            index=number,
            task=task,
            rollouts=tuple(self.rollout(task, name, i, version, s) for i, s in enumerate(solved)),
            scores=tuple(Score(reward=float(s), success=s, parts={"format": 1.0}) for s in solved),
            failed=(self.failed(task, name, 4),) if number % 25 == 7 else (),
            version=version,
        )


def _metrics(step: int, rate: float, source: random.Random) -> dict[str, float]:
    return {
        "rollout/reward": rate + source.gauss(0, 0.04),
        "rollout/success": min(1.0, max(0.0, rate + source.gauss(0, 0.04))),
        "entropy": 0.5 * (1 - rate) + source.gauss(0, 0.01) + 0.05,
        "logprob_max_abs_diff": 0.0,
        "grad_norm": 0.6 + source.gauss(0, 0.08),
        "learning_rate": 3e-4 * min(1, step / 10),
        "clip_fraction": 0.0,
        "rollout/tokens_mean": 60 + 10 * (1 - rate) + source.gauss(0, 1),
        "time/generating": 0.55 + source.gauss(0, 0.01),
        "time/training": 0.35 + source.gauss(0, 0.01),
        "time/waiting": 0.1,
        "time/step_s": 2.0,
        "time/worlds": 0.3,
        "time/engine/busy": 0.55,
        "time/engine/training": 0.35,
        "time/engine/other": 0.1,
        "time/trainer/busy": 0.35,
        "time/trainer/slowest_rollout": 0.15,
        "time/trainer/generating": 0.4,
        "time/trainer/other": 0.1,
        "tokens_forward": 9000 + source.gauss(0, 200),
        "micro_batches": 3.0,
        **{f"engine/{number}/tokens_per_s": 100.0 + number for number in range(2)},
        **{f"rank/{number}/sum_wait_s": 0.1 * number for number in range(2)},
        **{f"rollout/success/{tag}": source.betavariate(20 * rate + 1, 20 * (1 - rate) + 1) for tag in DATASETS},
    }


SUMMARY = {
    **{"sft_success": 0.561, "sft_success_low": 0.518, "sft_success_high": 0.603},
    **{"rl_success": 0.952, "rl_success_low": 0.931, "rl_success_high": 0.968, "no_tool_success": 0.04},
    "eval_tasks": 520,
    "logprob_max_abs_diff": 0.0,
    "tokens_sampled": 1_204_331,
    "tokens_trained": 730_120,
    "tokens": {
        "sampled": 1_204_331,
        "trained": 730_120,
        "filtered": 455_001,
        "zero_advantage": 15_210,
        "failed": 4_000,
    },
    "wall_s": {"init": 2.1, "sft": 61.0, "rl": 190.4, "eval": 38.2, "export": 0.6},
    "peak_rss_bytes": 1_430_000_000,
    "by_dataset": {
        name: {
            "coverage": coverage,
            "sft": sft,
            "rl": rl,
            "intervals": {"sft": (sft - 0.1, sft + 0.1), "rl": (rl - 0.05, rl + 0.02)},
            "tasks": 130,
        }
        for name, coverage, sft, rl in zip(
            DATASETS, ("well", "well", "thin", "thin"), (0.9, 0.83, 0.3, 0.21), (0.98, 0.97, 0.94, 0.91), strict=True
        )
    },
}


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 60 RL steps."""
    run = tmp_path_factory.mktemp("runs") / "sample"
    maker = _Maker(_tokenizer(run / "init" / "model"))
    store = SqliteStore(run / "store.sqlite")
    for step in range(1, 41):
        store.metric(
            "sft", step, {"loss_imitate": 3.0 * 0.93**step + 0.1 + maker.random.gauss(0, 0.02), "grad_norm": 1.0}
        )
    for step in range(STEPS):
        rates = [min(0.97, start + 0.9 * step / STEPS) for start in (0.8, 0.7, 0.25, 0.1)]
        for place, (tag, rate) in enumerate(zip(DATASETS, rates, strict=True)):
            store.append(maker.group(step * 4 + place, step, tag, rate), stage="rl")
        store.metric("rl", step + 1, _metrics(step + 1, sum(rates) / 4, maker.random))
    store.event("check", "a fact that is no event of a part")
    store.event("rl", "2 engines ready after 9.0 s", {"kind": "engine starts"})
    lost = {"kind": "engine lost", "engine": 1, "node": "b", "reason": HOSTILE, "moved": 3, "at_step": 30}
    store.event("rl", f"engine 1 is left out: {HOSTILE}", lost)
    store.close()
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "config.toml").write_text(CONFIG)
    return run


@pytest.fixture(scope="session")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the document of an address after its script ran, as a browser has it."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --virtual-time-budget=2000"
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert browser, "the report's tests need chromium: apt-get install chromium"

    def document(address: str) -> str:
        profile = tmp_path_factory.mktemp("profile")
        command = [browser, *flags.split(), f"--user-data-dir={profile}", "--dump-dom", address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return document
