"""What is told of a vLLM that did not start: the cause as well as the end."""

from __future__ import annotations

from sparring.engine.adapters.vllm_server import told

CAUSE = "(EngineCore pid=7) ERROR [core.py:1] ValueError: 0.35 GiB KV cache is needed"


def test_the_cause_is_told_though_it_stands_far_above_the_end() -> None:
    steps = [f"  File {number}" for number in range(60)]
    log = "\n".join(["INFO starting", CAUSE, *steps, "RuntimeError: initialization failed. See root cause above."])
    assert told(log).splitlines()[0] == CAUSE and told(log).splitlines()[1:] == log.splitlines()[-25:]


def test_a_short_log_is_told_once() -> None:
    log = f"INFO starting\n{CAUSE}"
    assert told(log) == log and told("") == ""
