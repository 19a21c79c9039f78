"""Installs what tests/peers asks, verl, into .venv-peers.

    python benchmarks/peers/setup_verl.py

verl comes without what it says it needs: its functions of advantages and losses import few of those, which are
benchmarks/peers/verl.txt.
"""

from __future__ import annotations

from turns import ROOT, install

VERL = "verl==0.9.1"


if __name__ == "__main__":
    install(ROOT / ".venv-peers", ROOT / "benchmarks" / "peers" / "verl.txt", VERL)
