"""Every verb as a newcomer uses it, on one tiny run: from another folder, with spaces in paths, stopped and started
again."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked, finished
from refusals import without_waits
from safetensors.numpy import load_file

from sparring.cli.main import main

COMMAND = (sys.executable, "-m", "sparring.cli.main")


def output_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a verb prints, run in this process."""
    capsys.readouterr()
    assert main(words) == code
    out, error = capsys.readouterr()
    return out if code == 0 else error


@pytest.mark.slow
def test_a_run_stopped_in_every_stage_ends_with_the_same_weights(run: Path, own_home: Path) -> None:
    words = (*COMMAND, "run", "first try.toml", "--name", "stopped often", "--set", "observe.lines_every_s=0")
    for moment in ("check: stages", "sft 3/6", "eval sft:", "export:"):
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            assert any(line.startswith(moment) for line in process.stdout), process.stderr.read()
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        if moment == "export:" and process.returncode == 0:
            continue  # it was done before the signal came
        assert process.returncode == 130, moment
        assert (
            "the same command goes on where it stopped: sparring run 'first try.toml' --name 'stopped often'" in error
        )
    assert finished(words[3:], cwd=own_home).returncode == 0
    again = own_home / "runs/stopped often"
    for stage in ("sft/model", "rl/model", "export"):
        one, other = (load_file(folder / stage / "model.safetensors") for folder in (run, again))
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (run, again))
    assert one["tokens"] == other["tokens"] and one["by_dataset"] == other["by_dataset"]


def test_checkpoints_are_kept_as_the_stage_says(run: Path) -> None:
    """`save_every` stands in `[rl.train]`, not in `[train]`."""
    assert {folder.name for folder in (run / "rl/checkpoints").iterdir()} >= {"step-000004", "step-000006"}
    assert {folder.name for folder in (run / "sft/checkpoints").iterdir()} >= {"step-000004", "step-000006"}


@pytest.mark.parametrize("rollout", ["rl/0/0", "rl/9/2", "eval/sft/1", "eval/rl/0", "eval/no_tool/1"])
def test_a_rollout_is_replayed_to_the_bit(run: Path, capsys: pytest.CaptureFixture[str], rollout: str) -> None:
    assert output_of(capsys, "replay", str(run), rollout).endswith("identical, bit for bit\n")


@pytest.mark.parametrize("words", [("{}", "rl/99/0"), ("{}", "no such"), ("{}/none", "rl/0/0"), ("{}/rl", "rl/0/0")])
def test_an_unknown_rollout_is_refused(run: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str]) -> None:
    message = output_of(capsys, "replay", *(word.format(run) for word in words), code=2)
    assert ": expected the " in message and ", got " in message and "; " in message


def test_eval_repeats_the_success_of_the_run(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((own_home / "runs/tiny/summary.json").read_text())
    lines = output_of(capsys, "eval", "first try.toml", "runs/tiny").splitlines()
    [total] = [line.split() for line in lines if line.startswith("all together")]
    assert total[:4] == ["all", "together", f"{100 * summary['rl_success']:.1f}", "%"] and total[-1] == "6"


def test_eval_refuses_more_tasks_than_there_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(home):
        message = output_of(capsys, "eval", "first try.toml", "runs/tiny", "--tasks", "13", code=2)
    assert message.startswith("eval.tasks: expected at most 12")


def test_export_casts_and_never_overwrites(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "for friends" / "model"
    assert output_of(capsys, "export", str(run), str(out), "--dtype", "bfloat16") == f"{out}\n"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert "expected a folder that does not exist yet" in output_of(capsys, "export", str(run), str(out), code=2)
    (tmp_path / "file").write_text("")
    blocked = output_of(capsys, "export", str(run), str(tmp_path / "file" / "model"), code=2)
    assert "expected a folder that can be made" in blocked


def test_the_report_is_written_again(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = own_home / "runs/tiny/report.html"
    report.unlink()
    assert output_of(capsys, "report", "runs/tiny") == "runs/tiny/report.html\n"
    assert "</html>" in report.read_text()


def test_a_run_that_is_going_on_may_be_looked_at(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "first try.toml", "--name", "live", "--set", "rl.steps=100000", "--set", "observe.lines_every_s=0"]
    with Forked(words, cwd=own_home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert any(line.startswith("rl 3/") for line in process.stdout)
        live = own_home / "runs/live"
        second = output_of(capsys, "run", "first try.toml", "--name", "live", "--set", "rl.steps=100000", code=2)
        page = output_of(capsys, "report", str(live))
        replayed = output_of(capsys, "replay", str(live), "rl/0/0")
        process.kill()
        process.stdout.close()
    assert f"got pid {process.pid}; " in second
    assert page == f"{live}/report.html\n"
    assert replayed.endswith("identical, bit for bit\n")


def test_chat_answers_also_where_it_is_cut_short(run: Path) -> None:
    lines = "hello\nand again\n/new\nhello\n/quit\nnever\n"
    done = finished(("chat", str(run), "--system", "Be brief.", "--max-tokens", "4"), lines)
    assert done.returncode == 0, done.stderr
    answers = [part for part in done.stdout.split("you> ") if part.startswith("it> ")]
    assert len(answers) == 3
    assert any("(cut short: max-tokens is used up)" in answer for answer in answers)
    assert without_waits(done.stderr) == "" and "  /1  " not in done.stdout
    assert "(without the tools and tasks of its run: env.name: expected a Python file my world.py, " in done.stdout


def test_chat_proposes_tasks_of_the_run(run: Path, home: Path) -> None:
    """In the folder that the run was started from, where its world is."""
    done = finished(("chat", str(run), "--max-tokens", "4"), "/2\n/quit\n", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    proposed = dict(re.findall(r"^  (/\d)  (\d+ \+ \d+ = \?)$", done.stdout, flags=re.MULTILINE))
    assert list(proposed) == ["/1", "/2", "/3"]
    assert f"you> task> {proposed['/2']}\n" in done.stdout and "it> " in done.stdout


TOOLLESS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_chat_goes_without_the_tool_where_the_template_has_no_place_for_it(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(run / "rl/model", folder)
    (folder / "chat_template.jinja").write_text(TOOLLESS)
    done = finished(("chat", str(folder), "--max-tokens", "4"), "hello\n/quit\n")
    assert (done.returncode, done.stderr) == (0, "") and "it> " in done.stdout
    assert "(without the Python tool: tools: expected a chat template that writes them, " in done.stdout


STOPPED = """
import sys
from pathlib import Path
from sparring.cli import chat
from sparring.cli.main import main
from sparring.launch import chat as launched

def loud(*args, **settings):
    talk = make(*args, **settings)
    reply = talk.reply
    async def announced(messages):
        print("thinking", flush=True)
        return await reply(messages)
    talk.reply = announced
    return talk

make, launched.Chat = launched.Chat, loud
sys.exit(main())
"""


@pytest.mark.full
def test_control_c_stops_an_answer_and_the_talk_goes_on(run: Path, tmp_path: Path) -> None:
    """The model may go on for a very long time here, so that the answer is surely not there yet."""
    long = tmp_path / "long"
    shutil.copytree(run / "rl/model", long)
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 60000, "eos_token_id": 0}))
    words = [
        sys.executable,
        "-c",
        STOPPED,
        "chat",
        str(long),
        "--no-tools",
        "--max-tokens",
        "50000",
        "--temperature",
        "0",
    ]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for word in ("count\n", "again\n"):
            process.stdin.write(word)
            process.stdin.flush()
            assert any("thinking" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert any("(stopped; say something else)" in line for line in process.stdout)
        _out, error = process.communicate("/quit\n", timeout=60)
    assert process.returncode == 0, error
    assert without_waits(error) == ""


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.safetensors", "{", ": expected a checkpoint that the library loads, got SafetensorError"),
        ("model.safetensors", None, ": expected a checkpoint that the library loads, got OSError"),
        ("config.json", "{", "/config.json: expected a config of a Hugging Face model, got OSError"),
        ("config.json", "{}", "/config.json: expected a config of a Hugging Face model, got ValueError"),
        ("tokenizer.json", "{", "/tokenizer.json: expected a tokenizer of the tokenizers library"),
        (
            "tokenizer.json",
            None,
            "/tokenizer.json: expected a tokenizer.json",
        ),
        ("tokenizer_config.json", "{", "/tokenizer_config.json: expected JSON"),
        (
            "chat_template.jinja",
            "{% for %}",
            "/chat_template.jinja: expected a chat template",
        ),
    ],
)
def test_chat_refuses_a_broken_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None, words: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    message = output_of(capsys, "chat", str(folder), code=2)
    assert message.startswith(f"{folder}{words}")
    assert message.count("; ") >= 1 and "\n" not in message.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-tokens", "0"), "argument --max-tokens: expected 1 or more"),
        (("--temperature", "-1"), "argument --temperature: expected 0 or more"),
        (("--temperature", "nan"), "argument --temperature: expected 0 or more"),
        (("--temperature", "warm"), "argument --temperature: expected a value"),
    ],
)
def test_chat_refuses_numbers_that_make_no_sense(
    words: tuple[str, str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["chat", "anywhere", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
