"""Requests of an update over sockets that behave as broken servers do."""

import socket
import threading
from contextlib import suppress

import pytest

from sparring.engine.adapters.weight_sender import GRACE_S, WeightSender
from sparring.errors import EngineError, WeightsError
from sparring.weights.upload import Bucket


@pytest.fixture
def silent():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def url_of(listening):
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_no_request_leaves_after_the_deadline(silent):
    with pytest.raises(WeightsError, match="within engine.update.timeout_s = -2, got none"):
        WeightSender(url_of(silent), {}, -GRACE_S).post("weights", b"{}")


def test_a_wait_ends_at_the_deadline(silent):
    with pytest.raises(WeightsError, match="unknown until it answers again"):
        WeightSender(url_of(silent), {}, 0.01 - GRACE_S).post("weights", b"{}")


def test_a_server_that_is_not_there_is_an_engine_error(tmp_path):
    with pytest.raises(EngineError, match="weights: ConnectError"):
        WeightSender(f"unix:{tmp_path / 'absent'}", {}, 60).post("weights", b"{}")


@pytest.mark.parametrize("size", [10, 64 << 20], ids=["waiting", "sending"])
def test_another_thread_ends_a_request_under_way(silent, size):
    sender, errors = WeightSender(url_of(silent), {}, 600), []
    bucket = Bucket(upload="a", size=size, offset=0, length=size, digest="")

    def send():
        try:
            sender.take(bucket, [memoryview(bytes(size))])
        except (EngineError, WeightsError) as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    connection, _ = silent.accept()
    assert connection.recv(10).startswith(b"POST")
    sender.cancel()
    thread.join()
    connection.close()
    assert len(errors) == 1


def test_an_answer_of_another_server_is_an_engine_error(silent):
    def answer():
        connection, _ = silent.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(EngineError, match="status 502: b'oops'"):
        WeightSender(url_of(silent), {}, 600).post("weights", b"{}")
    thread.join()


@pytest.mark.parametrize(
    ("head", "again", "said"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99, "a head of at most 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 16), "an answer of at most 1048576 bytes"),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 99, "a head of at most 65536 bytes"),
    ],
)
def test_an_answer_without_an_end_ends(silent, head, again, said):
    accepted = []

    def answer():
        accepted.append(silent.accept()[0])
        with accepted[0], suppress(OSError):
            accepted[0].sendall(head)
            while True:
                accepted[0].sendall(again)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(EngineError, match=said):
        WeightSender(url_of(silent), {}, 600).post("weights", b"{}")
    with suppress(OSError):
        accepted[0].shutdown(socket.SHUT_RDWR)
    thread.join()
