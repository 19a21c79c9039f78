"""Writes docs/engine/families.md: what of every causal LM of the transformers library can be served. Minutes; Linux.

    python docs/write_families.py

Each architecture is made tiny, with random weights, in a process of its own, and loaded as a run would load it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from sparring.errors import BadInput, boundary
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model

PAGE = Path(__file__).parent / "engine" / "families.md"
WRAPPED = runpy.run_path(str(PAGE.parents[1] / "wrap.py"))["wrapped"]
HEADS = {"num_key_value_heads": 4}
SHAPES: tuple[Mapping[str, Any], ...] = (
    {},
    HEADS,
    {**HEADS, "hidden_size": 64},
    {**HEADS, "hidden_size": 64, "head_dim": 16},
)
"""Tried one after the other: not every architecture can be made of the first."""
MEMORY, SECONDS = 4 << 30, 20
HEAD = """# Families

The table covers every `model_type` for which transformers ({version}) has a causal LM, or a model of text and images, whose text part is used. Each was made tiny, with random weights, and loaded in float32. Loading is the proof: the logits are transformers', sequences are independent, a sequence continues from pages of keys and values, and, for `exact`, every function of torch that transformers called between our modules is row-invariant. (The six models of the lean decoder have tests instead of a proof at load.) `tests/parity/test_families.py` compares two dozen families with float64, in bfloat16 too, and their engine with their trainer. A checkpoint with kinds of layers that the tiny model lacks, such as LFM2's convolutions, is refused by the name of the layer.

*This page is written by `docs/write_families.py`.*
"""


def outcome(kind: str, numerics: str, folder: str) -> str:
    """ "" where it loads, else why not."""
    why = ""
    for number, shape in enumerate(SHAPES):
        path = Path(folder) / str(number)
        try:
            with boundary(BadInput, "not made"):
                if not path.exists():
                    tiny_model(kind, path, seed=1, **shape)
        except BadInput as error:
            why = why or f"not made: {type(error.__cause__).__name__}"
            continue
        try:
            load(path, numerics=numerics)
        except BadInput as error:
            why = reason(str(error)) if not why or why.startswith("not made") else why
        else:
            return ""
    return why


def reason(message: str) -> str:
    """Return the `got` of a refusal."""
    said = re.sub(r"\s+", " ", message).rsplit("; ", 1)[0]
    return said.split(", got ", 1)[-1].split("(e.g.")[0].replace("|", "\\|")[:160]


def tried(kind: str) -> dict[str, str]:
    """By numerics, in a process of its own with bounds on memory and time."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.alarm(SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            found = {numerics: outcome(kind, numerics, folder) for numerics in ("exact", "fast")}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    ended = "too large or too slow here" if os.WIFSIGNALED(status) else "an exception without a type of ours"
    return json.loads(said) if said else dict.fromkeys(("exact", "fast"), ended)


def main() -> None:
    """Write the page."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}):
        found[kind] = tried(kind)
        sys.stderr.write(f"{kind}: {found[kind]}\n")
    exact = [kind for kind, one in found.items() if not one["exact"]]
    fast = {kind: one["exact"] for kind, one in found.items() if one["exact"] and not one["fast"]}
    rest = {kind: one["fast"] for kind, one in found.items() if one["exact"] and one["fast"]}
    both = sorted(kind for kind, why in rest.items() if "both directions" in why)
    lines = [HEAD.format(version=transformers.__version__)]
    lines += [f"## Exact: {len(exact)}\n", ", ".join(f"`{kind}`" for kind in exact), ""]
    lines += [f'## `numerics = "fast"` only: {len(fast)}\n', "| | why not exact |", "| --- | --- |"]
    lines += [f"| `{kind}` | {why} |" for kind, why in fast.items()]
    lines += ["", f"## Refused, or not made tiny: {len(rest)}\n", "| | why |", "| --- | --- |"]
    lines += [f"| `{kind}` | {why} |" for kind, why in rest.items() if kind not in both]
    lines += [f"| {', '.join(f'`{kind}`' for kind in both)} | attention in both directions |", ""]
    PAGE.write_text(WRAPPED("\n".join(lines)))


if __name__ == "__main__":
    main()
