"""Install the agent programs of the matrix into .harnesses: `install.py`, or `install.py latest` for the newest. What
cannot be installed is named and is `unverified` in the matrix; the status is 1 where nothing can be."""

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
    """Install what can be: everything together, or, where that fails, one program after the other."""
    words = [word for word in sys.argv[1:] if word]
    latest = "latest" in words
    folder = next((Path(word) for word in words if word != "latest"), PROGRAMS)
    folder.mkdir(exist_ok=True)
    listed = json.loads((HERE / "package.json").read_text())
    lines = [line for line in (HERE / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    if latest:
        listed["dependencies"] = dict.fromkeys(listed["dependencies"], "latest")  # Node stays: 22 is what they name
        lines = [re.sub("==.*", "", line) for line in lines]
    programs = [*listed["dependencies"], *lines]
    missing = [*without_npm(folder, listed), *without_pip(folder, lines)]
    for name in missing:
        print(f"{name}: not installed; it is unverified")
    print(f"installed {len(programs) - len(missing)} of {len(programs)} programs and libraries into {folder}")
    return int(len(missing) == len(programs))


def without_npm(folder: Path, listed: dict) -> list[str]:
    """Install npm's packages; return those that are not there then."""
    every = listed["dependencies"]
    for names in [list(every)], [[name] for name in every]:
        kept: dict[str, str] = {}
        for some in names:
            wanted = {**kept, **{name: every[name] for name in some}}
            (folder / "package.json").write_text(json.dumps({**listed, "dependencies": wanted}, indent=2))
            if run("npm", "install", "--no-fund", "--no-audit", folder=folder):
                kept = wanted
        (folder / "package.json").write_text(json.dumps({**listed, "dependencies": kept}, indent=2))
        if kept:
            break
    if "@anthropic-ai/claude-code" in kept:
        run("node", "node_modules/@anthropic-ai/claude-code/install.cjs", folder=folder)
    if "opencode-ai" in kept:
        run("node", "postinstall.mjs", folder=folder / "node_modules/opencode-ai")
    return [name for name in every if name not in kept]


def without_pip(folder: Path, lines: list[str]) -> list[str]:
    """Install pip's packages into a virtual environment; return those that are not there then."""
    # boxes see /usr: a virtual environment of an interpreter elsewhere needs that folder to be readable by any user
    python = next(
        path for path in ("/usr/bin/python3", shutil.which("python3") or sys.executable) if Path(path).exists()
    )
    pip = ("venv/bin/python", "-m", "pip", "install", "--quiet", "--upgrade")
    if not run(python, "-m", "venv", "venv", folder=folder):
        return lines
    if run(*pip, *lines, folder=folder):
        return []
    return [line for line in lines if not run(*pip, line, folder=folder)]


def run(*words: str, folder: Path) -> bool:
    """Run a command; say so where it fails, and return whether it did not."""
    try:
        status: int | str = subprocess.run(words, cwd=folder, check=False).returncode
    except OSError as error:
        status = str(error)
    if status:
        print(f"{' '.join(words[:7])}: {status}")
    return not status


if __name__ == "__main__":
    sys.exit(main())
