"""Held-out prompts that are told by their text: the same in every stream of every seed and setting."""

import pytest

from sparring.envs.splits import Splits, can_be_held_out, prompt_key
from sparring.errors import BadInput
from sparring.types import Message, Task


def world(seed: int, *, first: int = 0, prompts: int = 400) -> Splits:
    """Numbers, of which another setting knows others in part."""

    def draw(split: str, index: int, attempt: int) -> Task:
        number = first + hash((seed, split == "eval", index, attempt)) % prompts
        return Task(id=f"{split}/{index}", env="numbers", messages=(Message(role="user", content=f"what is {number}?"),))

    return Splits("numbers", draw, held_out=15, demonstrations=60, share=0.1)


def prompts(splits: Splits, split: str, count: int) -> set[str]:
    stream = splits.stream(split)
    tasks = [stream.next() for _ in range(count)]
    return {prompt_key(task) for task in tasks if task is not None}


def test_what_one_run_holds_out_no_other_trains_on() -> None:
    held = [prompts(world(seed, first=first), "eval", 15) for seed, first in ((1, 0), (2, 0), (1, 100))]
    assert len(set.union(*held)) > 15  # each holds out others
    for seed, first in ((1, 0), (2, 0), (3, 100)):
        shown = prompts(world(seed, first=first), "train", 500) | prompts(world(seed, first=first), "demonstration", 60)
        assert len(shown) > 100 and not shown & set.union(*held)


def test_the_share_is_of_all_prompts() -> None:
    tasks = [Task(id="x", env="x", messages=(Message(role="user", content=str(n)),)) for n in range(2000)]
    assert 160 < sum(can_be_held_out(task, 0.1) for task in tasks) < 240


def test_too_few_prompts_in_the_share_are_refused() -> None:
    with pytest.raises(BadInput, match="eval split"):
        world(1, prompts=20)
