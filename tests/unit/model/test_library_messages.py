"""What the transformers library has to say is told where everything is told, whenever the library was imported."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import transformers

import sparring.model.library  # noqa: F401

CODE = """
import io, sys
at_import = sys.stderr = io.StringIO()
import sparring.model.library, transformers
from sparring.observe.terminal import guard_terminal
at_import.close()
now = sys.stderr = io.StringIO()
guard_terminal()
transformers.utils.logging.get_logger("transformers.configuration_utils").warning("odd \\x1b[2J config")
print(repr(now.getvalue()))
"""


def test_the_library_has_no_stream_of_its_own() -> None:
    own = transformers.utils.logging._default_handler
    assert own is not None and own not in logging.getLogger("transformers").handlers


@pytest.mark.slow  # a process that imports it anew
def test_a_warning_goes_to_the_standard_error_of_now_without_escapes() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr("odd \\x1b[2J config\n") and done.stderr == ""
