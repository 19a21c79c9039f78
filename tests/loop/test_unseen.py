"""What is held out was not trained on by the runs before either."""

from pathlib import Path

import pytest

from sparring.config import dump, load
from sparring.errors import BadInput
from sparring.launch.run import run_with_earlier

SETTINGS = ["observe.progress=off", "sft.steps=1", "env.held_out=300", "env.demonstrations=400"]


def chain(given: Path, *settings: str) -> Path:
    """A recipe that demonstrates with another seed, and one that evaluates after it; the second."""
    first = given.with_name("first.toml")
    words = [*SETTINGS, 'run.stages=["sft"]', "run.name=first", "run.seed=2", *settings]
    first.write_text(_written(given, words))
    second = given.with_name("second.toml")
    words = [*SETTINGS, 'run.stages=["init", "eval"]', 'eval.checkpoints=["init"]', f'run.after=["{first}"]', *settings]
    second.write_text(_written(given, words))
    return second


def test_a_prompt_of_the_run_before_is_not_held_out(given: Path) -> None:
    with pytest.raises(BadInput, match="held-out task Sums/eval/.*got a prompt of the run of .*first.toml; give both recipes"):
        run_with_earlier(load(chain(given, "eval.tasks=300")))


def test_a_share_of_all_prompts_keeps_runs_apart(given: Path) -> None:
    folder = run_with_earlier(load(chain(given, "eval.tasks=6", "env.held_out_share=0.2")))
    assert (folder / "summary.json").is_file()


def _written(recipe: Path, settings: list[str]) -> str:
    return dump(load(recipe, settings))
