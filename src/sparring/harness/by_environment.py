"""Harnesses of several environments as one."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.protocols import Episode, Harness


class HarnessByEnvironment:
    """Harness that hands each episode to the one of its task's environment. Implements `protocols.Harness`.

    Args:
        harnesses: by the environment's name.
    """

    def __init__(self, harnesses: Mapping[str, Harness]) -> None:
        self._harnesses = dict(harnesses)

    async def run(self, episode: Episode) -> None:
        """Hold the conversation of one episode."""
        await self._harnesses[episode.task.env].run(episode)
