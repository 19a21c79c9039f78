"""`sparring eval` whose rollouts are played by workers: one waits from before, some are killed, Ctrl-C comes between."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import Forked
from test_worker_run import command, worker

from sparring.cli.main import main
from sparring.rewards import RewardRefused
from sparring.workers import claim

KEYS = {"worker_key": "wk-of-the-run", "reward_key": "rk-of-the-run"}
TOLD = "run: programs elsewhere: http://127.0.0.1:"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@pytest.mark.slow
def test_workers_play_the_evaluations_of_one_command_as_one_run_that_may_be_stopped(
    given: Path, checkpoint: Path, tmp_path: Path, wait_for: Callable[[subprocess.Popen[str], str], None]
) -> None:
    """The address is the recipe's and the key is the run's, so that a worker needs to know nothing of an evaluation."""
    port = free_port()
    run, other = given.parent / "runs/tiny", tmp_path / "other"
    shutil.copytree(checkpoint, other)
    run.mkdir(parents=True)
    given_keys = run / "keys.json"
    given_keys.write_text(json.dumps({"url": f"http://127.0.0.1:{port}", **KEYS}))
    settings = (f"rollout.gateway.listen=127.0.0.1:{port}", "env.held_out=6", "eval.no_tool_tasks=0")
    _, recipe, *sets = command(given, tmp_path, *settings)
    words = ["eval", recipe, str(checkpoint), str(other), *sets]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        early = stack.enter_context(worker(tmp_path, given_keys, "early"))
        early.send_signal(signal.SIGSTOP)  # it goes on when others hold their rollouts
        evaluation = stack.enter_context(Forked(words, **pipes))
        wait_for(evaluation, TOLD)
        written = json.loads((run / "evaluations/keys.json").read_text())
        assert written == json.loads(given_keys.read_text())
        with pytest.raises(RewardRefused, match="expected the run's worker key") as refused:
            next(claim(written["url"], "wk-another"))
        assert refused.value.status == 401
        dying, holding = [stack.enter_context(worker(tmp_path, given_keys, "dies")) for _ in range(2)]
        for each in (dying, holding):
            assert each.stdout is not None and each.stdout.readline().startswith("has eval/")
        early.send_signal(signal.SIGCONT)
        dying.kill()
        wait_for(evaluation, "eval 5/6")
        evaluation.send_signal(signal.SIGINT)
        said, _ = evaluation.communicate()
        holding.kill()
        assert evaluation.returncode == 130 and "the same command goes on where it stopped: sparring eval" in said
        again = stack.enter_context(Forked(words, **pipes))
        said, _ = again.communicate(timeout=300)
        assert again.returncode == 0, said
        played, _ = early.communicate(timeout=90)
        assert early.returncode == 0, "the worker ends with the command"
    first, second = [line for line in said.splitlines() if line.startswith("report: ")]
    places = [place.removeprefix("has eval/") for place in played.splitlines()]
    assert sorted(set(places[:6])) == sorted(places[6:]) == list("012345"), "six of each, none twice"
    for report in (first, second):
        result = json.loads(Path(report.removeprefix("report: ")).with_name("evaluation.json").read_text())
        (evaluated,) = result["evaluations"]
        assert (evaluated["evaluation"]["rollouts"], evaluated["evaluation"]["lost"]) == (6, [])
        assert evaluated["evaluation"]["reward"]["tasks"] == 6


def test_where_programs_elsewhere_reach_an_evaluation_is_no_part_of_it(given: Path, checkpoint: Path) -> None:
    """It goes on in the same folder at another address."""
    words = ["eval", str(given), str(checkpoint)]
    assert main(words) == 0
    evaluations = given.parent / "runs/tiny/evaluations"
    (folder,) = evaluations.iterdir()
    assert (
        main([*words, "--set", f"rollout.gateway.listen=127.0.0.1:{free_port()}", "--set", "rollout.gateway.lease_s=7"])
        == 0
    )
    assert list(evaluations.iterdir()) == [folder]
