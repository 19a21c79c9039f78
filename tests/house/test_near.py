"""`tests/near.py` finds every test that a change can touch, and no other."""

import runpy
import subprocess
from pathlib import Path

import pytest

NEAR = runpy.run_path(str(Path(__file__).resolve().parents[1] / "near.py"))
TREE = {
    "src/sparring/types.py": "",
    "src/sparring/store.py": "def f():\n    from sparring.types import T",
    "src/sparring/dashboard.py": "if TYPE_CHECKING:\n    import sparring.store",
    "src/sparring/kernels.cpp": "",
    "src/sparring/build.py": "SOURCE = 'kernels.cpp'",
    "tests/conftest.py": "import sparring.build",
    "tests/unit/test_types.py": "import sparring.types",
    "tests/unit/test_store.py": "from sparring.store import f",
    "tests/unit/test_dashboard.py": "import sparring.dashboard",
    "tests/unit/test_alone.py": "",
    "benchmarks/common/clock.py": "",
    "benchmarks/turns.py": "from common.clock import tick",
    "tests/unit/test_turns.py": "from turns import played",
    "tests/house/test_rules.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def near(tree: Path, *changed: str) -> list[str]:
    return [Path(file).stem for file in NEAR["near_tests"](tree, {tree / name for name in changed})]


def test_what_imports_a_change_is_near_and_the_nearest_comes_first(tree: Path) -> None:
    assert near(tree, "src/sparring/types.py") == ["test_types", "test_store", "test_dashboard", "test_rules"]
    assert near(tree, "src/sparring/store.py") == ["test_store", "test_dashboard", "test_rules"]
    assert near(tree, "src/sparring/dashboard.py") == ["test_dashboard", "test_rules"]
    assert near(tree, "tests/unit/test_alone.py") == ["test_alone", "test_rules"]
    assert near(tree, "benchmarks/common/clock.py") == ["test_turns", "test_rules"]


def test_a_file_that_is_no_module_is_what_names_it(tree: Path) -> None:
    """Here by a module of the conftest, which every test has."""
    every = {"test_types", "test_store", "test_dashboard", "test_alone", "test_turns", "test_rules"}
    assert set(near(tree, "src/sparring/kernels.cpp")) == every


def test_without_a_change_nothing_is_near(tree: Path) -> None:
    assert near(tree) == []


def test_git_says_what_has_changed(tree: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], cwd=tree, check=True)
    (tree / "src/sparring/types.py").write_text("T = 1")
    (tree / "tests/unit/test_new.py").write_text("")
    expected = {tree / "src/sparring/types.py", tree / "tests/unit/test_new.py"}
    assert NEAR["changed_files"](tree, "HEAD") == expected
