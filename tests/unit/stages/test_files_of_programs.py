"""The files that agent programs may need, against the machine's limit."""

from __future__ import annotations

import pytest
from refusals import refused_at

from sparring.errors import BadInput
from sparring.stages.preflight.harness import files_of, within_files


@pytest.mark.parametrize("places", [1, 24, 1000])
def test_as_many_as_they_need_are_enough_and_one_less_is_refused(places: int) -> None:
    wanted = files_of(places)
    assert f"within {wanted} open files" in within_files(places, wanted)
    with refused_at("open files", f"{wanted} for {places} programs"):
        within_files(places, wanted - 1)


def test_the_advice_is_what_fits() -> None:
    with pytest.raises(BadInput) as raised:
        within_files(100, 4096)
    most = int(str(raised.value).rpartition(" = ")[2])
    assert files_of(most) <= 4096 < files_of(most + 1) and within_files(most, 4096)
