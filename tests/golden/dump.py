"""`python tests/golden/dump.py` writes all golden vectors to `tests/golden/vectors.jsonl`, one JSON object per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import credit, distill, imitate, implicit, kl, policy, preference, right_answers, shaping, value

FILE = Path(__file__).with_name("vectors.jsonl")


def vectors() -> Iterator[dict[str, Any]]:
    """Yield the cases of every name."""
    for module in (credit, shaping, distill, kl):
        for rule in sorted(module.REFERENCES):
            yield from module.cases(rule)
    for part, name in policy.names():
        yield from policy.cases(part, name)
    for losses in (preference, value, imitate, right_answers, implicit):
        yield from (vector._asdict() for vector in losses.vectors())


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(vector) + "\n" for vector in vectors()), encoding="utf-8")
