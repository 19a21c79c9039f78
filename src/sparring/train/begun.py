"""Compatibility of checkpoints with older versions of the trainer, which computed two things differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Begun(NamedTuple):
    """Differences between this trainer and the version that began a run. A resumed run writes them into its own
    checkpoints too.

    Attributes:
        ends_late: the learning rate's schedule ends one step after the last (`optimiser.learning_rate`).
        misplaced: the first steps read non-contiguous gradients in the wrong order.
    """

    ends_late: bool = False
    misplaced: bool = False

    def manifest(self) -> dict[str, Any]:
        """Return the differences as entries of a checkpoint's manifest."""
        return {"schedule_ends_late": self.ends_late, "gradients_were_misplaced": self.misplaced}


def begun(manifest: Mapping[str, Any]) -> Begun:
    """Read the differences from a checkpoint's manifest; a manifest without these entries comes from a trainer version
    that has both differences."""
    return Begun(manifest.get("schedule_ends_late", True), manifest.get("gradients_were_misplaced", True))
