"""Attacks on the place where a box keeps its layers, by folders that commands are to begin in."""

from __future__ import annotations

from typing import Any

import pytest

PLACES = ("/proc/self/fd/%d", "/proc/self/cwd", "/proc/1/cwd", "/proc/1/root", "/proc/self/root", "/mnt")
LOOK = "pwd; ls -a . .. 2>/dev/null; for l in */own/box l/*/own/box; do echo forged > $l/prepared; done"


@pytest.mark.parametrize("image", ["python", pytest.param("host", marks=pytest.mark.full)])
def test_a_working_folder_that_is_a_link_reaches_no_layer(in_box: Any, image: str) -> None:
    """A fork of the box has its descriptors until it is a command, and `/proc/self/fd` names them."""

    async def work(box: Any) -> tuple[list[str], bytes]:
        await box.write("prepared", b"as it was")
        await box.snapshot()
        targets = [place % number if "%" in place else place for place in PLACES for number in range(3, 220)]
        links = dict.fromkeys(targets)
        await box.python("import os\n" + "\n".join(f"os.symlink({to!r}, 'd{at}')" for at, to in enumerate(links)))
        seen = []
        for at in [*range(195, 220), *range(len(links) - 5, len(links))]:
            try:
                seen.append((await box.exec(LOOK, cwd=f"d{at}")).stdout)
            except OSError:
                pass
        return seen, await (await box.verifier([])).read("prepared")

    seen, prepared = in_box(work, image=image)
    assert prepared == b"as it was"
    assert not [text for text in seen if "layers" in text or "\nown\n" in text]
