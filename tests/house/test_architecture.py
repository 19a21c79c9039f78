"""The lint of design/architecture.md finds what the tree lacks, and layers that differ."""

from pathlib import Path

import pytest
from architecture import absent, layers, tree

PAGE = """
    src/sparring/
      types/     nouns; parts/ of them,
                 and more
      loop.py    the run

      cluster/   processes
    recipes/     data

| layer | packages | heavy |
| --- | --- | --- |
| 0 | types | none |
| 1 | loop cluster (never ray) | torch |
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for folder in ("types/parts", "cluster"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("types/__init__.py", "cluster/__init__.py", "loop.py"):
        (tmp_path / file).write_text("")
    return tmp_path


def test_a_true_page_passes(source: Path) -> None:
    assert [*tree(PAGE)] == ["types/", "loop.py", "cluster/"]
    assert not list(absent(PAGE, source)) and not list(layers(PAGE, ("types", "cluster loop")))


@pytest.mark.parametrize(
    ("true", "said", "finding"),
    [
        ("loop.py ", "loops.py", "loops.py is not there"),
        ("parts/", "rays/", "types/rays/ is not there"),
        ("      cluster/   processes\n", "", "leaves out cluster/"),
    ],
)
def test_what_is_not_there_is_found(source: Path, true: str, said: str, finding: str) -> None:
    (found,) = absent(PAGE.replace(true, said), source)
    assert found.endswith(finding)


def test_another_layer_is_found() -> None:
    assert list(layers(PAGE, ("types", "loop"))) == ["design/architecture.md: layer 1 is loop"]
