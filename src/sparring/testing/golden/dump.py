"""`python -m sparring.testing.golden.dump` writes all golden vectors to standard output, one JSON object per line."""

from __future__ import annotations

import json
import sys

from sparring.testing.golden import kl, policy


def main() -> None:
    """Write every case of every name."""
    for part, name in policy.names():
        for case in policy.cases(part, name):
            sys.stdout.write(json.dumps(case) + "\n")
    for case in kl.cases():
        sys.stdout.write(json.dumps(case) + "\n")


if __name__ == "__main__":
    main()
