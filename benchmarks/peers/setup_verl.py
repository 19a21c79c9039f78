"""Installs what tests/peers asks, verl, into .venv-peers.

    PYTHONPATH=benchmarks python -m peers.setup_verl

verl comes without what it says it needs: its functions of advantages and losses import few of those, which are
benchmarks/peers/verl.txt.
"""

from __future__ import annotations

from common.figures import ROOT
from peers.sides import install

VERL = "verl==0.9.1"


if __name__ == "__main__":
    install(ROOT / ".venv-peers", ROOT / "benchmarks" / "peers" / "verl.txt", VERL)
