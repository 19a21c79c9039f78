"""Search for a checkpoint by a path of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sparring.errors import refusal
from sparring.model.gguf.cache import converted, gguf_file
from sparring.model.hub import SAVED, local_folder, model_folder
from sparring.model.peft import base_of, is_adapter
from sparring.stages.context import NON_POLICY_STAGES, ONLINE_STAGES, ORDER, RunFiles
from sparring.store.connection import is_blank
from sparring.store.sqlite import SqliteStore
from sparring.types import POLICY

CONFIG = "config.toml"
"""Recipe of a run, in its folder."""
STORE = "store.sqlite"
"""Record of a run, in its folder."""
PLACES = ("", "export", *(f"{stage}/model" for stage in reversed(ORDER) if stage not in (*NON_POLICY_STAGES, "export")))
"""Folders of a checkpoint inside the folder that the user names, newest first."""
TRAINING = ("sft", "preference", *ONLINE_STAGES)
"""Stages that save checkpoints of the policy."""


@contextmanager
def recorded_run(folder: Path, *, runs_rules: bool = False) -> Iterator[RunFiles]:
    """Open the recipe and the record of a run for reading inside a context. `runs_rules` is as in `load_recorded`.

    Raises:
        BadInput: the folder has no run, or a run of another version.
    """
    from sparring.recipe.load import load_recorded

    if not (folder / CONFIG).is_file():
        instead = f"a folder without {CONFIG}" if folder.is_dir() else "no folder"
        raise refusal(str(folder), "the folder of a run", instead, "give one, like runs/quickstart")
    with closing(SqliteStore(folder / STORE, read_only=True)) as store:
        yield RunFiles(config=load_recorded(folder / CONFIG, runs_rules=runs_rules), folder=folder, store=store)


def find_checkpoint(path: Path) -> Path:
    """Return the Hugging Face or adapter folder of a path. The path may be such a folder, a GGUF file (which is
    converted), the folder of a run (its newest weights), or a saved step of a run: `RUN/STAGE/best`, `RUN/STAGE/last`
    or `RUN/STAGE/step-000146`. Without STAGE, the last stage with checkpoints is taken."""
    if _is_run(path):
        is_blank(path / STORE)  # refuses another version
    folder = _find(path)
    run = run_of(path)
    if run is not None and is_adapter(folder) and not Path(base_of(folder)).exists():
        _make_base(run)
    return folder


def _find(path: Path) -> Path:
    for place in PLACES:
        if (path / place / "config.json").is_file() or is_adapter(path / place):
            return path / place
    named = _parse_step_name(path)
    if named is not None:
        return _saved_step(*named)
    file = gguf_file(path)
    if file is not None:
        return converted(file)
    instead = "a folder without config.json" if path.is_dir() else "no folder"
    advice = "check the path; a saved step of a run is written like runs/quickstart/rl/best"
    raise refusal(str(path), "a Hugging Face checkpoint folder or the folder of a run", instead, advice)


def checkpoint_or_hub(name: str) -> Path:
    """Return the folder of a name: a path as in `find_checkpoint`, or a model of the Hugging Face hub."""
    path = Path(name)
    return find_checkpoint(path) if path.is_dir() or _parse_step_name(path) is not None else local_folder(name)


def export_checkpoint(path: Path, out: Path, dtype: str) -> list[str]:
    """Write a checkpoint, found as by `find_checkpoint`, as a Hugging Face folder, and return sentences about its chat
    format. A checkpoint of a run gets the run's chat format."""
    from sparring.stages.export import export_folder

    checkpoint, folder = find_checkpoint(path), run_of(path)
    if folder is None:
        return export_folder(checkpoint, out, dtype)
    with recorded_run(folder) as run:
        return export_folder(checkpoint, out, dtype, (run.config, run.store))


def _make_base(run: Path) -> None:
    """Make the base model of a run again if it was deleted from the user's cache: convert its GGUF file, or add the
    recipe's template."""
    from sparring.recipe.load import load_recorded

    spec = load_recorded(run / CONFIG).models[POLICY]
    if spec.path is not None:
        model_folder(spec)


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that contains a path, or None if no run does. The path may be the run itself or the
    name of a saved step."""
    return next((folder for folder in (path, *path.parents) if _is_run(folder)), None)


def is_run_or_step(path: Path) -> bool:
    """Return whether a path is a run or the name of a saved step."""
    return _is_run(path) or _parse_step_name(path) is not None


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / STORE).is_file()


def _parse_step_name(path: Path) -> tuple[Path, str | None, str] | None:
    """Return run, stage and name of a saved step, or None if the path does not name a saved step."""
    if not SAVED.fullmatch(path.name):
        return None
    above = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    if _is_run(above):
        return above, None, path.name
    return (above.parent, above.name, path.name) if above.name in TRAINING and _is_run(above.parent) else None


def _saved_step(folder: Path, stage: str | None, name: str) -> Path:
    from sparring.stages.runtime.checkpoint_names import saved_step, weights_of

    with recorded_run(folder) as run:
        trained = [each for each in reversed(TRAINING) if (folder / each / "checkpoints").is_dir()]
        where = stage or next(iter(trained), run.config.run.stages[-1])
        return weights_of(run, where, saved_step(run, where, name))
