"""Refuses an archive of sources, which cannot hold `../src`; all else is in pyproject.toml."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.sdist import sdist


class NoArchive(sdist):
    """Archive of the folder, whose sources lie beside it."""

    def run(self) -> None:
        """Refuse."""
        raise SystemExit("sparring-boxes: expected a wheel, got an archive, which lacks ../src; do: pip wheel ./boxes")


setup(cmdclass={"sdist": NoArchive})
