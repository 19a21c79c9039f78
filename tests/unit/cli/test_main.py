"""The command line as a user meets it: in a process of its own."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from sparring.cli.main import VERBS, guarded, main, parser
from sparring.cli.recipe import load_recipe
from sparring.errors import BadInput, EngineError, StoreError
from sparring.launch.checkpoint import find_checkpoint
from sparring.recipe.sections.rl import RlConfig

RECIPE = """
[run]
name = "first"
[models.policy.init]
[env]
name = "reasoning_gym"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "first.toml"
    path.write_text(RECIPE)
    return path


def _sparring(*args: str, code: str = "") -> subprocess.CompletedProcess:
    start = code or "import sys; from sparring.cli.main import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", start, *args], capture_output=True, text=True, timeout=60)


def test_help_names_every_verb_and_imports_nothing_heavy() -> None:
    code = """
import sys
from sparring.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    print("code", end.code)
roots = {name.split(".")[0] for name in sys.modules}
print("heavy", sorted(roots & {"torch", "transformers", "numpy", "msgspec", "tokenizers", "pyarrow", "rich", "asyncio"}))
print("parts", sorted(n for n in sys.modules if n.startswith("sparring.") and n.split(".")[1] not in ("allocator", "annotations", "cli", "errors", "generation", "types") and not "sparring.observe.terminal".startswith(n)))
"""
    done = _sparring(code=code)
    for verb in ("run", "check", "eval", "export", "chat", "serve", "gateway", "replay", "diff", "report"):
        assert f"    {verb} " in done.stdout
    assert "code 0" in done.stdout
    heavy = next(line for line in done.stdout.splitlines() if line.startswith("heavy"))
    assert heavy in ("heavy []", "heavy ['asyncio']")
    assert "parts ['sparring.sandbox', 'sparring.sandbox.verbs']" in done.stdout


@pytest.mark.parametrize("verb", [verb.__name__.rpartition(".")[2].rstrip("_") for verb in VERBS])
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args([verb, "--help"])
    assert end.value.code == 0
    assert f"usage: sparring {verb}" in capsys.readouterr().out


def test_a_report_of_a_bug_can_name_versions_also_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "sparring", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for package in ("sparring", "torch", "transformers", "renderers"):
        assert f"{package} {metadata.version(package)}" in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "sparring: expected VERB"),
        (
            ["rum"],
            "sparring: argument VERB: expected one of 'run', 'check'",
        ),
        (["run"], "sparring run: expected RECIPE"),
        (["eval", "a.toml"], "sparring eval: expected CHECKPOINT"),
        (
            ["eval", "a.toml", "b", "--tasks", "x"],
            "sparring eval: argument --tasks: expected a value of type int",
        ),
        (["run", "a.toml", "--set"], "sparring run: argument --set: expected a value"),
        (["report", "a", "b"], "sparring: expected no more arguments"),
        (
            ["export", "a", "b", "--dtype", "int8"],
            "sparring export: argument --dtype: expected one of 'float32'",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_2(argv: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.endswith(" --help\n")


@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_refused_recipe_ends_with_2_and_one_line(verb: str, recipe: Path) -> None:
    recipe.write_text(RECIPE + "[rl]\nstepps = 3\n")
    keys = ", ".join(sorted(RlConfig.__struct_fields__))
    done = _sparring(verb, str(recipe))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"{recipe}: rl.stepps: expected one of {keys}, got an unknown key; do you mean rl.steps?"
    ]


@pytest.mark.parametrize("name", ["2 a", 'a"b', "a\\b", "true", "3"])
def test_set_and_name_override_the_recipe(recipe: Path, name: str) -> None:
    words = ["run", str(recipe), "--set", "rl.steps=3", "--set", "rl.groups_per_step=2", "--name", name]
    config = load_recipe(parser().parse_args(words))
    assert (config.rl.steps, config.rl.groups_per_step, config.run.name) == (3, 2, name)
    assert config.run.device != "auto" and config.run.threads > 0


@pytest.mark.parametrize(
    "argv",
    [["report", "{}"], ["replay", "{}", "rl/0/0"], ["diff", "{}", "{}"], ["export", "{}", "{}/out"], ["chat", "{}"]],
)
def test_a_folder_that_holds_nothing_is_refused(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([word.format(tmp_path) for word in argv]) == 2
    message = capsys.readouterr().err
    assert message.startswith(str(tmp_path)) and ": expected " in message and ", got " in message and "; " in message


@pytest.mark.parametrize("verb", [["gateway"], ["report"], ["replay"], ["export", "out"], ["convert", "out"]])
def test_a_path_that_cannot_be_opened_is_refused(verb: list[str], capsys: pytest.CaptureFixture) -> None:
    """Its name is too long here, since a folder without permission is open to root."""
    name = "a" * 300
    assert main([verb[0], name, *verb[1:]]) == 2
    message = capsys.readouterr().err
    assert message.startswith(name) and ": expected a path " in message


@pytest.mark.parametrize(
    ("verb", "signal", "module", "status"),
    [
        *(("check", "SIGINT", f"sparring.{name}", 130) for name in ("cli.main", "cli.report", "recipe.run_config")),
        ("check", "SIGINT", "sparring.launch.run", 130),
        ("run", "SIGTERM", "sparring.cli.main", 75),
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line(
    verb: str, signal: str, module: str, status: int, recipe: Path
) -> None:
    """It arrives in the middle of the import of `module`."""
    code = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})
sys.meta_path.insert(0, Interrupt())
from sparring.cli.start import main
sys.exit(main())
"""
    done = _sparring(verb, str(recipe), code=code)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "\ninterrupted\n")


def test_an_interrupt_ignored_by_the_shell_stays_ignored() -> None:
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from sparring.cli.start import main
try:
    main()
finally:
    print(signal.getsignal(signal.SIGINT).name)
"""
    assert _sparring("--help", code=code).stdout.endswith("SIG_IGN\n")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "\ninterrupted; the same command goes on where it stopped: sparring run a.toml\n"),
        (BadInput("a: expected b, got c; do d"), 2, "a: expected b, got c; do d\n"),
        (EngineError("engine: gone"), 1, "EngineError: engine: gone\n"),
        (StoreError("store: damaged"), 1, "StoreError: store: damaged\n"),
    ],
)
def test_an_end_has_a_status_and_one_line(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture
) -> None:
    assert (guarded(_raising(error), "sparring run a.toml"), capsys.readouterr().err) == (status, said)


def test_a_full_disk_is_found_behind_other_errors(capsys: pytest.CaptureFixture) -> None:
    error = StoreError("store: cannot write")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert guarded(_raising(error), "sparring run a.toml") == 2
    assert capsys.readouterr().err.startswith("disk: expected room")


def test_an_error_nobody_foresaw_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(_raising(ZeroDivisionError()), "sparring run a.toml")


def _raising(error: BaseException) -> Callable[[], int]:
    def verb() -> int:
        raise error

    return verb


def test_a_checkpoint_is_found_in_a_run(tmp_path: Path) -> None:
    for place in ("init/model", "rl/model"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text(json.dumps({}))
    assert find_checkpoint(tmp_path) == tmp_path / "rl/model"
    assert find_checkpoint(tmp_path / "init/model") == tmp_path / "init/model"
