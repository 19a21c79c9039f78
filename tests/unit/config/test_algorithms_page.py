"""docs/algorithms.md says what the code says."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_is_what_its_writer_writes() -> None:
    written = runpy.run_path(str(DOCS / "write_algorithms.py"))["page"]()
    assert (DOCS / "algorithms.md").read_text() == written, "run: python docs/write_algorithms.py"
    assert "### `rloo`\n\nRLOO: a rollout is judged against the mean of its siblings." in written
    assert "| `lambda_policy` | number | `0.95` | " in written
