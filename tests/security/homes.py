"""A home as its user has it: agent programs installed in every way that is usual, and secrets beside each of them.

`node` is a shell that reads a script's text as its own, and a Python prefix borrows the library of the system's: what is
tested is where files lie, and that the boxes' user can start what lies there.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

SYSTEM_PYTHON = Path(os.path.realpath("/usr/bin/python3"))
VERSION = SYSTEM_PYTHON.name
NODE = "#!/usr/bin/env node\n"
HERE = '. "$(dirname "$(readlink -f "$0")")"'

SECRETS = (
    ".ssh/id_ed25519 .aws/credentials .netrc .env .npmrc .gnupg/private.key .docker/config.json .config/gh/hosts.yml "
    ".cache/huggingface/token .local/share/keyrings/login.keyring .local/share/opencode/auth.json .local/state/key "
    ".local/lib/notes .local/bin/deploy bin/deploy work/.env work/src/code.py work/lib/notes other/code.py .nvm/token "
    ".nvm/versions/node/v22.1.0/lib/node_modules/private/code.js .npm-global/etc/npmrc .pyenv/token "
    ".pyenv/versions/3.11.9/.env .volta/token .local/share/pnpm/rc miniconda3/.condarc miniconda3/envs/e/.env "
    ".local/share/uv/tools/five/.env .bun/token .local/share/thirteen/settings.json"
).split()

PROGRAMS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
"""Names of the programs, each in a layout of its own; every one prints its name and nothing else."""


def furnish(home: Path) -> str:
    """Fill a home. Returns the PATH of its user."""
    nvm = home / ".nvm/versions/node/v22.1.0"
    _write(home / "bin/one", "#!/bin/sh\necho one\n")
    _write(home / "two", "#!/bin/sh\necho two\n")

    _write(home / ".local/bin/three", f"#!{SYSTEM_PYTHON}\nimport three_dependency\n")  # pip install --user
    _write(home / f".local/lib/{VERSION}/site-packages/three_dependency.py", "print('three')")

    _environment(home / ".local/share/pipx/venvs/four", "four", SYSTEM_PYTHON)
    _link(home / ".local/bin/four", home / ".local/share/pipx/venvs/four/bin/four")

    python = _python(home / ".local/share/uv/python/cpython-3.11.9-linux")
    _link(home / ".local/share/uv/python/cpython-3.11-linux", python.parent.parent)
    _link(home / f".local/bin/{VERSION}", python)
    _environment(
        home / ".local/share/uv/tools/five", "five", home / f".local/share/uv/python/cpython-3.11-linux/bin/{VERSION}"
    )
    _link(home / ".local/bin/five", home / ".local/share/uv/tools/five/bin/five")

    _write(nvm / "bin/node", '#!/bin/sh\nexec /bin/sh "$@"\n')
    _package(home / ".npm-global/lib", "six", nested=True)
    _link(home / ".npm-global/bin/six", Path("../lib/node_modules/six/cli.js"))
    _package(nvm / "lib", "@scope/seven", nested=True)
    _link(nvm / "bin/seven", Path("../lib/node_modules/@scope/seven/cli.js"))

    python = _python(home / ".pyenv/versions/3.11.9")
    _script(python.parent / "eight", python, home / f".pyenv/versions/3.11.9/lib/{VERSION}/site-packages")
    _write(home / ".pyenv/bin/pyenv", f"#!/bin/sh\necho {python.parent}/$2\n")
    _write(home / ".pyenv/shims/eight", "#!/usr/bin/env bash\nexec pyenv exec eight\n")

    _package(home / ".volta/tools/image/packages/nine/lib", "nine", nested=True)
    _link(home / ".volta/tools/image/packages/nine/bin/nine", Path("../lib/node_modules/nine/cli.js"))
    _write(home / ".volta/bin/volta-shim", "never started")
    _write(home / ".volta/bin/volta", f"#!/bin/sh\necho {home}/.volta/tools/image/packages/$2/bin/$2\n")
    _link(home / ".volta/bin/nine", Path("volta-shim"))

    pnpm = home / ".local/share/pnpm"
    _package(pnpm / "global/5/.pnpm/ten@1.0.0", "ten", nested=False)
    _link(pnpm / "global/5/node_modules/ten", Path("../.pnpm/ten@1.0.0/node_modules/ten"))
    text = '#!/bin/sh\nbasedir=$(dirname "$0")\nexec node "$basedir/global/5/node_modules/ten/cli.js" "$@"\n'
    _write(pnpm / "ten", text)

    _package(home / "work", "eleven", nested=False)
    _link(home / "work/node_modules/.bin/eleven", Path("../eleven/cli.js"))

    python = _python(home / "miniconda3/envs/e")
    _script(python.parent / "twelve", python, home / f"miniconda3/envs/e/lib/{VERSION}/site-packages")

    _write(home / ".local/share/thirteen/versions/1.0", "#!/bin/sh\necho thirteen\n")
    _link(home / ".local/bin/thirteen", home / ".local/share/thirteen/versions/1.0")

    _environment(home / "work", "fourteen", SYSTEM_PYTHON)  # python -m venv . in a project
    _package(home / ".bun/install/global", "fifteen", nested=False)
    _link(home / ".bun/bin/fifteen", Path("../install/global/node_modules/fifteen/cli.js"))

    for secret in SECRETS:
        _write(home / secret, "SECRET\n")
    (home / ".ssh/id_ed25519").chmod(0o600)
    (home / ".ssh").chmod(0o700)
    folders = f"bin . .local/bin .npm-global/bin {nvm.relative_to(home)}/bin .pyenv/shims .volta/bin .local/share/pnpm"
    folders += " work/node_modules/.bin miniconda3/envs/e/bin work/bin .bun/bin"
    return ":".join([*(os.path.normpath(home / folder) for folder in folders.split()), "/usr/bin", "/bin"])


def own(home: Path, uid: int) -> None:
    """Give a home to a user, who closes it to all others."""
    for path in (home, *home.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)
    home.chmod(0o700)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _script(path: Path, interpreter: Path, packages: Path) -> None:
    """Write a console script as pip does; what it imports lies among the packages."""
    _write(path, f"#!{interpreter}\nimport {path.name}_dependency\n")
    if packages.is_relative_to(path.parent.parent) and not (packages.parent).is_symlink():
        _write(packages / f"{path.name}_dependency.py", f"print('{path.name}')\n")
    else:
        _write(path, f"#!{interpreter}\nimport random\nprint('{path.name}')\n")


def _environment(folder: Path, name: str, python: Path) -> None:
    _write(folder / "pyvenv.cfg", f"home = {python.parent}\ninclude-system-site-packages = false\n")
    _link(folder / "bin/python", python)
    _script(folder / f"bin/{name}", folder / "bin/python", folder / f"lib/{VERSION}/site-packages")


def _python(prefix: Path) -> Path:
    """Install a Python; returns its path."""
    python = prefix / "bin" / VERSION
    python.parent.mkdir(parents=True)
    shutil.copy(SYSTEM_PYTHON, python)
    _link(prefix / "lib" / VERSION, Path("/usr/lib") / VERSION)
    return python


def _package(folder: Path, name: str, *, nested: bool) -> None:
    """Install a package of npm whose program sources a dependency, which lies in it or beside it."""
    modules, short = folder / "node_modules", name.rpartition("/")[2]
    package = modules / name
    _write(package / "cli.js", f"{NODE}{HERE}/{'node_modules' if nested else '..'}/{short}_dep/index.js\n")
    _write((package / "node_modules" if nested else modules) / f"{short}_dep/index.js", f"echo {short}\n")


if __name__ == "__main__":
    print(furnish(Path(sys.argv[1])))
