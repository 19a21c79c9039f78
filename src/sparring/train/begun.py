"""Ways in which a run may have been begun, and in which its checkpoints are told apart from those of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Begun(NamedTuple):
    """Beginning of a run. A resume keeps it, so that checkpoints say it to the end.

    Attributes:
        ends_late: its learning rate ends one step after the last (`optimiser.learning_rate`).
        misplaced: its first steps read gradients that were not contiguous in the wrong order.
    """

    ends_late: bool = False
    misplaced: bool = False

    def manifest(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's manifest that say it."""
        return {"schedule_ends_late": self.ends_late, "gradients_were_misplaced": self.misplaced}


def begun(manifest: Mapping[str, Any]) -> Begun:
    """Return how the run of a checkpoint was begun: a manifest that does not say it is older than both cures."""
    return Begun(manifest.get("schedule_ends_late", True), manifest.get("gradients_were_misplaced", True))
