"""The lint of clocks sees every way to ask for the time of day."""

import ast

from clocks import asks


def test_every_way_to_ask_is_seen() -> None:
    for text in ("import time\ntime.time()", "datetime.now()", "from time import time", "datetime.datetime.utcnow()"):
        assert list(asks("a.py", ast.parse(text))) == ["a.py"], text
    assert not list(asks("a.py", ast.parse("time.monotonic()\nloop.time()\nself.time.time_s")))
