"""The pool of boxes that a recipe names: bubblewrap's, or one of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from sparring.errors import BadInput, boundary, refusal
from sparring.protocols import Boxes
from sparring.sandbox.config import SandboxConfig


def make_boxes(config: SandboxConfig, mounts: Mapping[str, str] | None = None) -> Boxes:
    """Return the pool of `config.kind`.

    Args:
        mounts: files and folders of the host that agent programs need, by their path in the boxes; None: the boxes run
            no programs.

    Raises:
        BadInput: `config.kind` names no function that makes boxes.
    """
    if config.kind == "bubblewrap":
        from sparring.sandbox.bubblewrap import BubblewrapBoxes

        return BubblewrapBoxes(config, mounts)
    module, _, name = config.kind.partition(":")
    expected = "'bubblewrap', or package.module:factory, a function of the config and the mounts that returns boxes"
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise refusal("sandbox.kind", expected, f"{config.kind!r}: {error}", "correct it, or install it") from error
    with boundary(BadInput, f"sandbox.kind: {config.kind}"):
        boxes: Boxes = factory(config, mounts)
    missing = [word for word in ("take", "close") if not callable(getattr(boxes, word, None))]
    if missing:
        actual = f"{type(boxes).__name__} without {' and '.join(missing)}"
        raise refusal("sandbox.kind", expected, actual, "return an object of protocols.Boxes")
    return boxes
