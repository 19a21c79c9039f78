"""`python -m sparring.testing.golden.dump` writes all golden vectors to standard output, one JSON object per line."""

from __future__ import annotations

import json
import sys

from sparring.testing.golden import (
    credit,
    distill,
    imitate,
    implicit,
    kl,
    policy,
    preference,
    right_answers,
    shaping,
    value,
)


def main() -> None:
    """Write every case of every name."""
    for of in (credit, shaping, distill, kl):
        for rule in sorted(of.REFERENCES):
            for case in of.cases(rule):
                sys.stdout.write(json.dumps(case) + "\n")
    for part, name in policy.names():
        for case in policy.cases(part, name):
            sys.stdout.write(json.dumps(case) + "\n")
    of_losses = (preference, value, imitate, right_answers, implicit)
    for vector in (vector for of in of_losses for vector in of.vectors()):
        sys.stdout.write(json.dumps(vector._asdict()) + "\n")


if __name__ == "__main__":
    main()
