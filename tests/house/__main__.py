"""The lints of the house: what breaks a rule in the source, the tests and the pages, a line each.

python tests/house          exit status 1 where something does
"""

import importlib
import sys
from concurrent.futures import ProcessPoolExecutor

LINTS = (
    *("structure", "annotations", "architecture", "clocks", "cxx", "metrics", "one_token", "pages", "reaches", "rules"),
    "typed",
)
"""Modules of this folder, each with `findings()`; the one that takes longest comes first."""


def findings_of(lint: str) -> list[str]:
    """Return what one lint finds."""
    return list(importlib.import_module(lint).findings())


def main() -> int:
    with ProcessPoolExecutor() as pool:
        findings = [finding for found in pool.map(findings_of, LINTS) for finding in found]
    print(*findings, sep="\n", end="\n" if findings else "")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
