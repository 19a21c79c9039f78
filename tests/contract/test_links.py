"""What every link between a run and the server of an engine keeps. A new link adds a factory to `LINKS`."""

import json
import os
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refused_at

from sparring.errors import WeightsError
from sparring.weights import disk
from sparring.weights.disk import Disk
from sparring.weights.fetch import TRANSPORTS, fetch
from sparring.weights.http import Http
from sparring.weights.inline import publish, reference
from sparring.weights.links import WeightLinks
from sparring.weights.shared_memory import FOLDER, PREFIX, SharedMemory, sweep
from sparring.weights.upload import BUCKET, Received, UploadArea

LINKS = {
    "shared_memory": lambda folder: SharedMemory(),
    "disk": lambda folder: Disk(folder, "engine.shared_folder"),
    "http": lambda folder: Http(),
}
STATES = {
    "float32": {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor([1.0, -0.0]), "c": torch.zeros(0, 4)},
    "bfloat16": {"a": torch.arange(33, dtype=torch.bfloat16).reshape(3, 11), "n": torch.tensor(7)},
}


class Receiver:
    """Server's part of every link: it takes buckets, and fetches what crossed as JSON. `harm` changes the pieces of a
    bucket on their way."""

    def __init__(self, most=1 << 30, harm=lambda data: data):
        self.area, self._harm = UploadArea(most), harm

    def take(self, bucket, data):
        receiving = self.area.receive(bucket)
        for piece in self._harm(data):
            receiving.add(bytes(piece))
        receiving.finish()

    def fetched(self, ref):
        ref = replace(ref, location=json.loads(json.dumps(ref.location)))
        if isinstance(ref.location, dict) and "upload" in ref.location:
            upload = self.area.complete(ref.location["upload"], "here")
            ref = replace(ref, location=Received(ref.location, upload.data))
        return fetch(ref)

    sees = fetched


class Elsewhere(Receiver):
    """Server on a machine with another /dev/shm and without the folder: it sees only what was sent to it."""

    def sees(self, ref):
        if "upload" not in ref.location:
            raise WeightsError("no such file")
        self.fetched(ref)


def bits(state):
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in state.items()
    }


@pytest.fixture(params=LINKS)
def link(request, tmp_path):
    link = LINKS[request.param](tmp_path)
    yield link
    link.close()
    assert not list(tmp_path.iterdir())


def test_every_transport_has_its_case():
    assert {"inline", *LINKS} == set(TRANSPORTS)


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("adapter", [None, "mine"])
def test_every_bit_crosses(link, state, adapter):
    server, ref = Receiver(), publish("policy", 3, state, ((1, 2), (-0.5,)), adapter=adapter)
    with link.published(ref) as published:
        sent = link.send(published, server)
        assert replace(sent, transport="inline", location=ref.location) == ref and sent.transport == link.transport
        assert bits(server.fetched(sent)) == bits(state)


def test_two_servers_fetch_one_publication_with_their_own_versions(link):
    links, ref = WeightLinks([link]), publish("policy", 3, STATES["float32"])
    servers, locations = [Receiver(), Receiver()], []
    with links.published(link, ref) as first, links.published(link, replace(ref, version=9)) as second:
        for published, server in zip((first, second), servers, strict=True):
            sent = link.send(published, server)
            locations.append(published.location)
            assert bits(server.fetched(sent)) == bits(STATES["float32"])
        assert (first.version, second.version) == (3, 9) and locations[0] == locations[1]
    with links.published(link, ref) as again:
        assert link.transport == "http" or again.location != locations[0]


def test_a_publication_outlives_those_who_leave_first(link):
    links, ref, server = WeightLinks([link]), publish("policy", 3, STATES["float32"]), Receiver()
    with links.published(link, ref) as mine:
        with links.published(link, ref):
            pass
        assert bits(server.fetched(link.send(mine, server))) == bits(STATES["float32"])


def test_a_wrong_digest_is_found_and_its_tensor_named(link):
    server, ref = Receiver(), publish("policy", 3, STATES["float32"])
    with link.published(replace(ref, location={**ref.location, "b": torch.tensor([1.0, 0.0])})) as published:
        sent = link.send(published, server)
        with pytest.raises(WeightsError, match=f"expected checksum {ref.checksum}.*first in tensor b"):
            server.fetched(sent)


def test_a_reference_of_another_link_or_with_a_damaged_location_is_refused(link):
    server, ref = Receiver(), publish("policy", 3, STATES["float32"])
    with link.published(ref) as published:
        sent = link.send(published, server)
        location = {**sent.location, "tensors": {"a": {"dtype": "float32", "shape": [9, 9], "offset": 0}}}
        other = "disk" if link.transport != "disk" else "http"
        for wrong in (replace(sent, location=location), replace(sent, location=3), replace(sent, transport=other)):
            with pytest.raises(WeightsError):
                server.fetched(wrong)


@pytest.mark.parametrize("kind", ["shared_memory", "disk"])
def test_a_cut_file_and_one_that_is_gone_are_refused(kind, tmp_path):
    link, server = LINKS[kind](tmp_path), Receiver()
    with link.published(publish("policy", 3, STATES["float32"])) as ref:
        path = FOLDER / ref.location["segment"] if kind == "shared_memory" else tmp_path.glob("*/state-*").__next__()
        with open(path, "r+b") as file:
            file.truncate(100)
        with pytest.raises(WeightsError, match="expected a file of"):
            server.fetched(ref)
        path.unlink()
        with pytest.raises(WeightsError, match="its publisher has removed it or has ended"):
            server.fetched(ref)
        for trick in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")):
            trick(path)
            with pytest.raises(WeightsError):
                server.fetched(ref)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    link.close()


def test_the_last_two_versions_stay_in_the_folder_until_the_run_ends(tmp_path):
    link, server, refs = Disk(tmp_path, "engine.shared_folder"), Receiver(), []
    for version in range(3):
        with link.published(publish("policy", version, {"a": torch.full((3,), float(version))})) as ref:
            refs.append(ref)
    for version in (1, 2):
        assert server.fetched(refs[version])["a"].tolist() == [version] * 3
    with pytest.raises(WeightsError, match="has removed it"):
        server.fetched(refs[0])
    names = sorted(path.name for path in tmp_path.glob("*/*"))
    assert names == ["lock", "state-000002", "state-000003"]
    other = Disk(tmp_path, "engine.shared_folder")
    with other.published(publish("policy", 0, STATES["float32"])):
        assert bits(server.fetched(refs[2]))  # a live publisher's folder is left alone
    other.close()
    link.close()
    assert not list(tmp_path.iterdir())


def test_what_a_dead_run_left_in_the_folder_is_removed(tmp_path):
    """What runs of other machines left stays: where locks are unknown to other machines, they may live."""
    with Disk(tmp_path, "engine.shared_folder").published(publish("policy", 0, STATES["float32"])):
        (live,) = tmp_path.iterdir()
    dead = live.with_name(f"{live.name[:-16]}{'0' * 16}")
    other = live.with_name(live.name.replace(f"-{os.getpid()}-", f"-2-{os.getpid()}-"))
    for folder in (dead, other):
        folder.mkdir()
        (folder / disk.LOCK).touch()
    link = Disk(tmp_path, "engine.shared_folder")
    with link.published(publish("policy", 0, STATES["float32"])):
        assert live.exists() and other.exists() and not dead.exists()
    link.close()


def test_a_folder_that_takes_no_file_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "absent", Path("/proc")):
        link = Disk(folder, "engine.shared_folder")
        with pytest.raises(WeightsError, match="free bytes in"), link.published(publish("policy", 0, {})):
            pass
        link.close()


def test_a_folder_that_is_full_keeps_what_is_complete(tmp_path):
    """Full: no file may be longer, which every write past it hears as an error."""
    link, server = Disk(tmp_path, "engine.shared_folder"), Receiver()
    with link.published(publish("policy", 0, STATES["float32"])) as first:
        pass
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        large = publish("policy", 1, {"a": torch.ones(1 << 16)})
        with pytest.raises(WeightsError, match=f"{1 << 18} free bytes in"), link.published(large):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert bits(server.fetched(first)) == bits(STATES["float32"])
    assert [path.name for path in tmp_path.glob("*/state*")] == [first.location["file"]]
    link.close()


OWN_FOLDER = """
import subprocess, sys, torch
from pathlib import Path
from sparring.errors import WeightsError
from sparring.weights.disk import Disk
from sparring.weights.inline import publish

for option, size in ("size=1m", 1 << 19), ("ro", 1):
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "none", sys.argv[1]], check=True)
    try:
        with Disk(Path(sys.argv[1]), "engine.shared_folder").published(publish("policy", 0, {"a": torch.ones(size)})):
            pass
    except WeightsError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_full_and_a_read_only_file_system_are_reported(tmp_path):
    words = ["unshare", "--mount", sys.executable, "-c", OWN_FOLDER, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    full, read_only = done.stdout.splitlines()
    assert "No space left on device" in full and "Read-only file system" in read_only


HARMS = {
    "cut": (lambda data: [data[0][:-1]], "expected 16 bytes, got 15"),
    "longer": (lambda data: [data[0], b"1"], "expected 16 bytes, got more"),
    "wrong": (lambda data: [bytes(len(data[0]))], "expected digest"),
}


@pytest.mark.parametrize(("harm", "said"), HARMS.values(), ids=HARMS)
def test_a_wrong_bucket_is_refused_and_its_upload_never_complete(harm, said):
    state, link = {"a": torch.arange(16.0)}, Http()
    said = said.replace("16", "64").replace("15", "63")
    server, ref = Receiver(harm=harm), publish("policy", 3, state)
    with link.published(ref) as published, pytest.raises(WeightsError, match=said):
        link.send(published, server)
    with pytest.raises(WeightsError, match="expected an upload of 64 bytes, got 0"):
        server.area.complete(server.area._upload.name, "here")


def test_a_large_state_crosses_in_buckets_and_one_upload_replaces_another():
    state = {"a": torch.arange(BUCKET // 4 + 5, dtype=torch.int32), "b": torch.ones(3)}
    link, server, sizes = Http(), Receiver(), []
    server._harm = lambda data: (sizes.append(sum(map(len, data))), data)[1]
    with link.published(publish("policy", 3, state)) as ref:
        first, second = link.send(ref, server), link.send(ref, server)
        assert sizes == [BUCKET, 128] * 2 and torch.equal(server.fetched(second)["a"], state["a"])
        with pytest.raises(WeightsError, match="got none or another"):
            server.fetched(first)


def test_two_runs_on_one_server_hear_of_each_other():
    """The second upload begins while the first is under way."""
    link, server, begun = Http(), Receiver(), []
    ref = reference("policy", 3, {"a": torch.zeros(BUCKET // 4 + 5)})

    def harm(data):
        if not begun:
            begun.append(True)
            link.send(ref, server)
        return data

    server._harm = harm
    with pytest.raises(WeightsError, match="use one server per run"):
        link.send(ref, server)


def test_an_upload_larger_than_the_model_is_refused():
    link, server = Http(), Receiver(most=100)
    with link.published(publish("policy", 3, STATES["float32"])) as ref:
        with pytest.raises(WeightsError, match="expected an upload of at most 100 bytes"):
            link.send(ref, server)


def test_the_link_is_chosen_by_what_the_server_sees(tmp_path):
    shared, folder, http = (factory(tmp_path) for factory in LINKS.values())
    everything = WeightLinks([shared, folder, http])
    assert everything.choose(Receiver(), "engine") is shared
    assert WeightLinks([folder, http]).choose(Receiver(), "engine") is folder
    assert WeightLinks([shared, http]).choose(Elsewhere(), "engine") is http
    with refused_at("engine.shared_folder", "no such file"):
        everything.choose(Elsewhere(), "engine")
    everything.close()
    assert not list(tmp_path.iterdir())


def test_threads_share_one_publication(tmp_path):
    link, links = LINKS["disk"](tmp_path), None
    links, ref, meeting, seen = WeightLinks([link]), publish("policy", 3, STATES["float32"]), threading.Barrier(3), []

    def push():
        with suppress(threading.BrokenBarrierError), links.published(link, ref) as published:
            seen.append(published.location["file"])
            meeting.wait(30)

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 3 and len(set(seen)) == 1
    links.close()


@pytest.mark.parametrize("kind", ["shared_memory", "disk"])
def test_threads_publish_different_states_at_once(kind, tmp_path):
    link, meeting, wrong = LINKS[kind](tmp_path), threading.Barrier(4), []

    def push(number):
        server = Receiver()
        meeting.wait(30)
        for version in range(8):
            state = {"a": torch.full((3,), float(10 * number + version))}
            try:
                with link.published(publish(f"model {number}", version, state)) as ref:
                    assert bits(server.fetched(ref)) == bits(state)
            except (WeightsError, AssertionError) as error:
                wrong.append(error)

    threads = [threading.Thread(target=push, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    link.close()
    assert not wrong and not list(tmp_path.iterdir())


def test_a_pipe_of_another_user_holds_nobody_up(tmp_path):
    pipe = FOLDER / f"{PREFIX}{os.getpid()}-{'0' * 16}"
    os.mkfifo(pipe)
    sweep()
    assert not pipe.exists()


def test_nothing_is_left_in_shared_memory():
    link, ref = SharedMemory(), publish("policy", 3, STATES["float32"])
    with link.published(ref) as published:
        assert (FOLDER / published.location["segment"]).exists()
    assert not (FOLDER / published.location["segment"]).exists() and published.location["segment"].startswith(PREFIX)
