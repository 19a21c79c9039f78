"""What is held out was not trained on by the runs before either."""

from pathlib import Path

import msgspec
import pytest

from sparring.errors import BadInput
from sparring.launch.run import run_recipe, run_with_earlier
from sparring.recipe.load import load
from sparring.recipe.run_config import dump

SETTINGS = ["observe.progress=off", "sft.steps=1", "env.held_out=300", "env.demonstrations=150"]
SETTINGS += ["eval.tasks=20", "eval.no_tool_tasks=0", "env.limits.max_tokens=2"]


def write_recipe(given: Path, name: str, *settings: str) -> Path:
    """The tiny recipe with these settings, as a file and a run of this name."""
    recipe = given.with_name(f"{name}.toml")
    recipe.write_text(dump(load(given, [*SETTINGS, f"run.name={name}", *settings])))
    return recipe


def after(given: Path, name: str, before: Path, *settings: str) -> Path:
    """A recipe that evaluates what it is given, after another."""
    return write_recipe(
        given, name, 'run.stages=["init", "eval"]', 'eval.checkpoints=["init"]', f'run.after=["{before}"]', *settings
    )


def recipe_of_another_seed(given: Path, *settings: str) -> Path:
    """A recipe that demonstrates with another seed."""
    return write_recipe(given, "first", 'run.stages=["sft"]', "run.seed=2", *settings)


@pytest.mark.full
def test_a_prompt_of_the_run_before_is_not_held_out(given: Path) -> None:
    last = load(after(given, "second", recipe_of_another_seed(given)))
    with pytest.raises(BadInput, match="held-out task Sums/eval/.*got a prompt of the run of .*first.toml"):
        run_with_earlier(last)
    alone = msgspec.structs.replace(last, run=msgspec.structs.replace(last.run, name="alone", after=()))
    assert (run_recipe(alone) / "summary.json").is_file(), "it says that it comes after nothing"


@pytest.mark.full
def test_prompts_of_all_earlier_runs_are_not_held_out(given: Path) -> None:
    middle = write_recipe(given, "middle", 'run.stages=["init"]', f'run.after=["{recipe_of_another_seed(given)}"]')
    with pytest.raises(BadInput, match="held-out task Sums/eval/.*got a prompt of the run of .*middle.toml"):
        run_with_earlier(load(after(given, "last", middle)))


def test_a_share_of_all_prompts_keeps_runs_apart(given: Path) -> None:
    share = "env.held_out_share=0.2"
    folder = run_with_earlier(load(after(given, "second", recipe_of_another_seed(given, share), share)))
    assert (folder / "summary.json").is_file()
