"""docs/configuration.md says what the code says, and every field says what it is."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_is_what_its_writer_writes() -> None:
    written = runpy.run_path(str(DOCS / "write_configuration.py"))["page"]()
    assert (DOCS / "configuration.md").read_text() == written, "run: python docs/write_configuration.py"
    assert "| `group_size` | integer | `8` | " in written
