"""Builds the boxes from `../src`, where all of Sparring is; the rest is in pyproject.toml."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

NEEDED = {
    "sparring": "__init__ __main__ annotations disk errors generation log open_files reply scratch user_cache".split(),
    "sparring.observe": ["__init__", "terminal", "wait_reports"],
}
"""Modules that boxes need of packages that have others too."""


class BoxesAlone(build_py):
    """Copy of the packages without the modules that no box needs."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of each module to copy."""
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [row for row in modules if row[1] in NEEDED.get(package, [row[1]])]


class NoArchive(sdist):
    """Archive of the folder, whose sources lie beside it."""

    def run(self) -> None:
        """Refuse."""
        raise SystemExit("sparring-boxes: expected a wheel, got an archive, which lacks ../src; do: pip wheel ./boxes")


setup(cmdclass={"build_py": BoxesAlone, "sdist": NoArchive})
