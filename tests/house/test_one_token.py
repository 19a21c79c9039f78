"""The lint of docs/path/one-token.md numbers lines again and refuses what is not there."""

import pytest
from one_token import PAGE, WRITER


def test_a_line_that_moved_is_numbered_again() -> None:
    assert "[loop.py:1](x)" not in WRITER["numbered"]("`run_loop` [loop.py:1](x)")
    link = WRITER["numbered"]("`run_loop` [loop.py:1](x)")
    assert " ".join(link.split()) in " ".join(PAGE.split())


@pytest.mark.parametrize("symbol", ["run_loops", "StepWindow.acquire"])
def test_what_is_not_defined_there_is_refused(symbol: str) -> None:
    with pytest.raises(LookupError, match=f"src/sparring/loop.py: expected a definition of {symbol}, got none"):
        WRITER["numbered"](f"`{symbol}` [loop.py:1](x)")
