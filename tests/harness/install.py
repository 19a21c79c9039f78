"""Install the agent programs of the matrix into .harnesses: `install.py`, or `install.py latest` for the newest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = HERE.parents[1] / ".harnesses"


def main() -> int:
    """Install what can be; what cannot is `unverified` in the matrix."""
    latest = "latest" in sys.argv[1:]
    PROGRAMS.mkdir(exist_ok=True)
    listed = json.loads((HERE / "package.json").read_text())
    lines = [line for line in (HERE / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    if latest:
        listed["dependencies"] = dict.fromkeys(listed["dependencies"], "latest")  # Node stays: 22 is what they name
        lines = [re.sub("==.*", "", line) for line in lines]
    (PROGRAMS / "package.json").write_text(json.dumps(listed, indent=2))
    run("npm", "install", "--no-fund", "--no-audit")
    run("node", "node_modules/@anthropic-ai/claude-code/install.cjs")
    run("node", "postinstall.mjs", folder=PROGRAMS / "node_modules/opencode-ai")
    # boxes see /usr: a virtual environment of an interpreter elsewhere needs that folder to be readable by any user
    python = next(
        path for path in ("/usr/bin/python3", shutil.which("python3") or sys.executable) if Path(path).exists()
    )
    run(python, "-m", "venv", "venv")
    run("venv/bin/python", "-m", "pip", "install", "--quiet", "--upgrade", *lines)
    return 0


def run(*words: str, folder: Path = PROGRAMS) -> None:
    """Run a command; say so where it fails."""
    try:
        status = subprocess.run(words, cwd=folder, check=False).returncode
    except OSError as error:
        status = str(error)
    if status:
        print(f"{' '.join(words[:3])}: {status}; what it installs is unverified")


if __name__ == "__main__":
    sys.exit(main())
