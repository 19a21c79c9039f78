"""What the sinks write can be read back."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.text.text_plugin import text_array_to_html
from tensorboard.util.tensor_util import make_ndarray

from sparring.observe.config import ObserveConfig
from sparring.observe.headline import Pace, clock_text, headlines
from sparring.observe.progress import LiveProgress, progress
from sparring.observe.sinks.console import ConsoleSink
from sparring.observe.sinks.jsonl import JsonlSink
from sparring.observe.sinks.load import load_sinks
from sparring.observe.sinks.sink import Fanout, SampleRow, Sink

SAMPLES = [
    SampleRow(rollout="rl/4/0", task="gcd:1", conversation="user: | a\n\n# b\ud800", reward=0.5, outcome="completed"),
    SampleRow(rollout="rl/4/1", task="gcd:1", conversation="", reward=None, outcome="truncated"),
]


def tell(sink: Sink, steps: int = 3) -> None:
    """A short stage."""
    sink.start("rl", steps)
    for step in range(1, steps + 1):
        sink.log(
            "rl",
            step,
            {"rollout/reward": step / 10, "rollout/success": 0.5, "time/tokens_per_s": 1234.5, "odd": float("nan")},
        )
    sink.samples("rl", steps, SAMPLES)
    sink.event("rl", "checkpoint at step 3")


def test_json_lines_come_back(tmp_path: Path) -> None:
    for _ in range(2):  # a resumed run appends
        sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
        tell(sink)
        sink.close()
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 10 and all("time" in line for line in lines)
    assert lines[0]["total_steps"] == 3 and lines[4]["event"] == "checkpoint at step 3"
    assert lines[2]["step"] == 2 and lines[2]["values"]["rollout/reward"] == 0.2 and lines[2]["values"]["odd"] is None


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "rl"}\n{"stage": "r')
    sink = JsonlSink(path)
    sink.event("rl", "resumed")
    sink.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[2])["event"] == "resumed"


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    script = """
import resource, sys
from sparring.errors import StoreError
from sparring.observe.sinks.jsonl import JsonlSink
sink = JsonlSink(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for number in range(1000):
    try:
        sink.event("rl", "x" * 50)
    except StoreError as error:
        print(number, error)
        break
"""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    number, _, message = done.stdout.partition(" ")
    assert (
        int(number) > 10
        and f"{path}: expected to write a line" in message
        and "got a limit of 0.002 MB for each file" in message
    )
    assert len([line for line in path.read_text().splitlines() if line.endswith("}")]) == int(number)


def test_an_event_of_a_part_has_its_facts(tmp_path: Path) -> None:
    """In the record first, of which one that breaks loses nothing; then in the sinks."""
    recorded, shown = list[object](), io.StringIO()
    sinks = [JsonlSink(tmp_path / "metrics.jsonl"), ConsoleSink(shown)]
    facts = {"kind": "engine lost", "engine": 1, "node": "b", "reason": "no answer", "moved": 3, "at_step": 7}
    Fanout(sinks, lambda *told: recorded.append(told)).event("rl", "it is left out", facts)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"time": line["time"], "stage": "rl", "event": "it is left out", **facts}
    assert recorded == [("rl", "it is left out", facts)] and shown.getvalue() == "rl: it is left out\n"


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sinks = load_sinks(ObserveConfig(), tmp_path, name="run", recipe={})
    tell(Fanout(sinks))
    Fanout(sinks).event("rl", "engine lost\n# not a head", {"at_step": 2})
    Fanout(sinks).close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("rl/rollout/reward")] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert "rl/odd" not in events.Tags()["scalars"]
    [shown] = events.Tensors("rl/samples")
    cells = make_ndarray(shown.tensor_proto)
    assert shown.step == 3 and cells.shape == (3, 5)
    events_shown = events.Tensors("rl/events")
    told = text_array_to_html(make_ndarray(events_shown[1].tensor_proto), enable_markdown=True)
    assert [each.step for each in events_shown] == [0, 2] and "engine lost" in told and "<h1>" not in told
    page = text_array_to_html(cells, enable_markdown=True)
    assert page.count("<tr>") == 3 and "<h1>" not in page and "user: | a" in page and "None" in page
    assert (tmp_path / "metrics.jsonl").is_file()


def test_no_sink_needs_torch(tmp_path: Path) -> None:
    script = """
import sys
from sparring.observe.config import ObserveConfig
from sparring.observe.progress import progress
from sparring.observe.sinks.load import load_sinks
before = [m for m in ("rich", "tensorboard", "wandb") if m in sys.modules]
load_sinks(ObserveConfig(), sys.argv[1], name="run", recipe={})
import sparring.rollout.evaluate, sparring.rollout.resample, sparring.store.sqlite
print(before, [m for m in ("torch", "tensorflow", "transformers") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"


def test_a_missing_library_is_refused_by_name(tmp_path: Path) -> None:
    script = """
import sys
from sparring.errors import BadInput
from sparring.observe.config import ObserveConfig
from sparring.observe.sinks.load import load_sinks
sys.path = [p for p in sys.path if "site-packages" not in p or p.endswith("src")]
try:
    load_sinks(ObserveConfig(sinks=("wandb",)), sys.argv[1], name="run", recipe={})
except BadInput as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("observe.sinks: expected the wandb")


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_progress_prints_few_lines_with_headlines() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = ConsoleSink(stream, every_s=5.0, clock=clock)
    sink.start("rl", 100)
    for step in range(1, 101):
        clock.now += 1
        sink.log("rl", step, {"rollout/reward": 0.25, "time/generating": 0.625, "hidden": 1.0})
    sink.event("rl", "best so far")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "rl: 100 steps" and lines[-1] == "rl: best so far"
    assert lines[1] == "rl 1/100  eta 1:39  reward 0.250  generating 62%"
    assert lines[-2].startswith("rl 100/100  eta 0:00")
    assert len(lines) == 2 + 20 + 1  # steps 1, 6, ..., 96 and the last


def test_other_stages_do_not_move_a_stages_progress() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = ConsoleSink(stream, every_s=0.0, clock=clock)
    sink.start("rl", 10)
    for step in (1, 2):
        clock.now += 1
        sink.log("rl", step, {})
        sink.log("eval", 1, {"success": 0.5})
    assert stream.getvalue().splitlines() == ["rl: 10 steps", "rl 1/10  eta 0:09", "rl 2/10  eta 0:08"]


def test_a_resumed_stage_knows_its_pace() -> None:
    clock = Clock()
    pace = Pace(100, clock)
    assert pace.remaining_s is None
    for step in (91, 92):
        clock.now += 10
        pace.advance(step)
    assert pace.remaining_s == 80.0


def test_the_first_of_many_at_once_does_not_say_when_the_last_ends() -> None:
    """Eight of forty at a time, ten seconds each: what the first one took, forty would not take."""
    stream, clock = io.StringIO(), Clock()
    sink = ConsoleSink(stream, every_s=0.0, clock=clock)
    sink.start("eval", 40, 8)
    for number in range(1, 41):
        clock.now += 10.0 if number % 8 == 1 else 0.0
        sink.log("eval", number, {})
    told = [line.split()[-1] for line in stream.getvalue().splitlines()[1:]]
    assert told[:8] == ["-:--"] * 7 + ["0:40"] and told[-1] == "0:00"
    few = Pace(6, clock, 32)
    for number in range(1, 7):
        clock.now += 1
        few.advance(number)
        assert (few.remaining_s is None) == (number < 3)


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--"), (0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_times_read_like_times(seconds: float | None, text: str) -> None:
    assert clock_text(seconds) == text


def test_headlines_leave_out_missing_metrics() -> None:
    assert headlines({"rollout/success": 0.5, "loss_imitate": float("nan"), "logprob_max_abs_diff": 0.0}) == [
        ("success", "50.0%"),
        ("logprob difference", "0"),
    ]


def test_headlines_show_more_if_engine_and_trainer_differ() -> None:
    mismatch = {"logprob_mean_abs_diff": 0.0, "mismatch_k3": 0.0, "mismatch_ess": 1.0}
    assert headlines({**mismatch, "logprob_max_abs_diff": 0.0}) == [("logprob difference", "0")]
    assert headlines(
        {"logprob_max_abs_diff": 0.25, "logprob_mean_abs_diff": 0.031, "mismatch_k3": 5e-4, "mismatch_ess": 0.9987}
    ) == [
        ("logprob difference", "0.25"),
        ("mean", "0.031"),
        ("k3", "0.0005"),
        ("effective samples", "99.87%"),
    ]


def test_the_live_view_shows_the_step_and_leaves_a_line_per_stage() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    view = LiveProgress(console)
    tell(view)
    with console.capture() as capture:
        console.print(view._view())
    shown = capture.get()
    assert "step 3/3" in shown and "0.300" in shown and "1,234" in shown and "eta 0:00" in shown
    view.start("eval", 0)
    view.close()
    text = stream.getvalue()
    assert "rl: checkpoint at step 3" in text and "rl 3/3" in text and "reward 0.300" in text


def test_progress_is_live_in_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    live = progress(ObserveConfig(), Terminal())
    live.close()
    assert isinstance(live, LiveProgress)
    assert isinstance(progress(ObserveConfig(), io.StringIO()), ConsoleSink)
    assert isinstance(progress(ObserveConfig(progress="plain"), Terminal()), ConsoleSink)
    off = progress(ObserveConfig(progress="off"), Terminal())
    tell(off)
    off.close()


def test_an_invalid_observe_section_is_refused() -> None:
    with pytest.raises(ValueError, match="must not repeat"):
        ObserveConfig(sinks=("jsonl", "jsonl"))
