"""A recipe that asks for vLLM where there is none is refused by name, before any work starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparring.cli.main import main


@pytest.mark.parametrize(
    ("python", "got"),
    [
        ("/no/such/python", "/no/such/python: No such file or directory"),
        (sys.executable, f"{sys.executable}, which cannot"),
    ],
)
def test_no_vllm(given: Path, capsys: pytest.CaptureFixture[str], python: str, got: str) -> None:
    assert main(["check", str(given), "--set", "engine.kind=vllm", "--set", f"engine.vllm.python={python}"]) == 2
    error = capsys.readouterr().err
    assert "engine.vllm.python: expected a Python" in error and f"got {got}" in error and "make test-vllm" in error


def test_two_bounds_on_importance_weights_are_refused(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(given), "--set", "algo.correction=tis", "--set", "algo.anchor=behaviour"]) == 2
    assert 'anchor must be "proximal" with a correction that has weights' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.kv.tokens=4096", 'engine.kv.tokens: expected its default with engine.kind = "vllm"'),
        ("engine.kv.across_turns=offload", 'engine.kv.across_turns: expected "keep" or "drop" with vLLM'),
        ("models.policy.lora={rank=4}", "models.policy.lora: expected none with vLLM"),
        (
            'rollout.sampling.constraint={kind="regex",source="a+"}',
            'rollout.sampling.constraint: expected none with engine.kind = "vllm"',
        ),
    ],
)
def test_what_vllm_does_not_do(given: Path, capsys: pytest.CaptureFixture[str], setting: str, said: str) -> None:
    assert main(["check", str(given), "--set", "engine.kind=vllm", "--set", setting]) == 2
    assert said in capsys.readouterr().err
