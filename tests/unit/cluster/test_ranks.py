"""What the cluster says of ranks before any is started, and the frames that they are called by."""

import errno
import os
import resource
import signal
import threading
from contextlib import chdir
from pathlib import Path

import msgspec
import pytest

from sparring.cluster.call_log import BACKWARD, STEP, UnsavedCalls
from sparring.cluster.config import ClusterConfig
from sparring.cluster.frames import StandsStill, receive, send
from sparring.cluster.inline import InlineCluster
from sparring.cluster.processes import ProcessCluster
from sparring.cluster.rank import RankEnded, RankFailure
from sparring.cluster.rank_process import RankProcess
from sparring.engine.config import EngineConfig
from sparring.errors import StoreError
from sparring.store.codec import decode
from sparring.train.config import TrainConfig
from sparring.types import CheckpointRef


@pytest.mark.parametrize(
    ("settings", "noun"),
    [
        ({"kind": "local", "ranks": 0}, "ranks must be 1 to 64"),
        ({"kind": "inline", "ranks": 2}, 'kind = "local"'),
        ({"kind": "local", "ranks": 2, "rank_threads": -1}, "rank_threads"),
        ({"kind": "local", "shard": "parameters"}, "set ranks = 2 or more"),
        ({"kind": "local", "ranks": 2, "shard": "everything"}, "everything"),
        ({"kind": "local", "timeout_s": 1.0}, "timeout_s"),
        ({"kind": "local", "timeout_s": 3e6}, "timeout_s must be at most"),
        ({"kind": "local", "start_timeout_s": float("inf")}, "start_timeout_s must be at most"),
    ],
)
def test_settings_of_ranks_that_cannot_be_are_refused(settings: dict[str, object], noun: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=noun):
        msgspec.convert(settings, ClusterConfig)


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_more_ranks_than_cores_are_told(ranks: int) -> None:
    config, engine = ClusterConfig(kind="local", ranks=ranks), EngineConfig()
    here = InlineCluster(models={}, train=TrainConfig(), engine=engine, device="cpu", threads=2)
    cluster = ProcessCluster(config, Path(), here)
    facts = [fact for fact in cluster.check() if "ranks" in fact]
    assert len(facts) == (ranks > 1)
    assert any("slower" in fact for fact in facts) == (ranks > max(1, len(os.sched_getaffinity(0))))


def test_frames_cross_a_pipe_in_order_and_whole() -> None:
    there, here = os.pipe()
    frames = [b"", b"method", bytes(range(256)) * 20_000]  # the last is more than a pipe holds
    sending = threading.Thread(target=lambda: [send(here, frame, 30.0) for frame in frames])
    sending.start()
    assert [receive(there, 30.0) for _ in frames] == frames
    sending.join()
    os.write(here, b"\x09")
    os.close(here)
    with pytest.raises(EOFError):
        receive(there)
    os.close(there)


def test_the_other_end_may_not_stand_still_for_ever() -> None:
    there, here = os.pipe()
    with pytest.raises(StandsStill):
        receive(there, 0.01)
    with pytest.raises(StandsStill):
        send(here, bytes(1 << 20), 0.01)
    os.close(there)
    with pytest.raises(BrokenPipeError):
        send(here, b"more", 0.01)
    os.close(here)


SAVED = CheckpointRef(model="policy", stage="rl", step=1, path="here")


def made(calls: UnsavedCalls, *methods: str) -> None:
    """Make and keep calls, whose data is their names."""
    for method in methods:
        calls.add(calls.write(method, method.encode()))


def left(calls: UnsavedCalls) -> list[str]:
    found = [(call.method, data) for call, data in calls]
    assert all(method.encode() == data for method, data in found)
    return [method for method, _ in found]


def test_calls_are_kept_until_a_checkpoint_has_what_they_did() -> None:
    calls = UnsavedCalls()
    made(calls, BACKWARD, STEP, BACKWARD)
    calls.write(STEP, b"is never made")
    assert left(calls) == [BACKWARD, STEP, BACKWARD] == left(calls) and calls.steps == 1
    calls.saved(SAVED)
    assert left(calls) == [BACKWARD], "a checkpoint has no gradients"
    assert calls.steps == 0 and calls.base is not None
    made(calls, STEP)
    calls.restored(SAVED)
    assert left(calls) == []
    made(calls, BACKWARD)
    assert left(calls) == [BACKWARD]
    calls.close()


def test_a_call_that_failed_leaves_no_gradient_to_be_made_again() -> None:
    calls = UnsavedCalls()
    made(calls, BACKWARD, STEP, BACKWARD, BACKWARD)
    calls.failed(calls.write(BACKWARD, b""))
    assert left(calls) == [BACKWARD, STEP]
    calls.failed(calls.write(STEP, STEP.encode()))
    assert [call.failed for call, _ in calls] == [False, False, True]
    calls.close()


def test_a_full_disk_fails_a_call_before_it_is_made() -> None:
    calls, before = UnsavedCalls(), resource.getrlimit(resource.RLIMIT_FSIZE)
    made(calls, BACKWARD)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(StoreError, match="temporary files"):
            calls.write(BACKWARD, bytes(1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    made(calls, STEP)
    assert left(calls) == [BACKWARD, STEP]
    calls.close()


@pytest.mark.parametrize("cause", [OSError(errno.ENOSPC, "full"), MemoryError(), ValueError("other")])
def test_the_cause_of_an_error_in_a_rank_is_told(cause: Exception) -> None:
    """As for one process: a full disk has a status of its own, and lack of memory repeats what the run was told."""
    error = StoreError("checkpoint here: cannot be written")
    error.__cause__ = cause
    there = RankFailure.of(error).error()
    assert type(there) is StoreError and str(there) == str(error)
    assert type(there.__cause__) is (type(None) if isinstance(cause, ValueError) else type(cause))
    assert getattr(there.__cause__, "errno", None) == getattr(cause, "errno", None)


def test_a_process_finds_no_modules_of_the_folder_and_is_not_called_when_closed(
    tmp_path: Path,
) -> None:
    """A call of a closed one would write into whatever file has the number of its pipe by now."""
    (tmp_path / "queue.py").write_text("raise ImportError('of the folder')")
    with chdir(tmp_path):
        rank = RankProcess(0)
    assert "forward_backward" in decode(rank.call("forward_backward", b"")[0], RankFailure).message  # it has no trainer
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(rank.pid, number)
    assert "push" in decode(rank.call("push", b"")[0], RankFailure).message
    rank.close()
    there, here = os.pipe()
    with pytest.raises(RankEnded, match="closed"):
        rank.call("step", b"")
    os.set_blocking(there, False)
    os.close(here)
    assert os.read(there, 1) == b""
    os.close(there)


def test_a_process_that_cannot_be_started_leaves_no_descriptor() -> None:
    """There is room for its log and its pipes, but not for what starting it takes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    free = [number for number in range(len(before) + 5) if not Path(f"/proc/self/fd/{number}").exists()]
    for limit in free[:5]:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
            with pytest.raises(OSError):
                RankProcess(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert os.listdir("/proc/self/fd") == before
