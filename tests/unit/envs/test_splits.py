"""Held-out tasks that are told by their text, or by a key of the world's own: the same in every stream of every seed
and setting."""

from dataclasses import replace

import pytest
from refusals import refused_at

from sparring.envs.splits import Splits, can_be_held_out, derived_seed, identity, prompt_content
from sparring.errors import BadInput
from sparring.types import Message, Task, ToolCall


def world(seed: int, *, first: int = 0, prompts: int = 400) -> Splits:
    """Numbers, of which another setting knows others in part."""

    def draw(split: str, index: int, attempt: int) -> Task:
        number = first + hash((seed, split == "eval", index, attempt)) % prompts
        return Task(
            id=f"{split}/{index}", env="numbers", messages=(Message(role="user", content=f"what is {number}?"),)
        )

    return Splits("numbers", draw, held_out=15, demonstrations=60, share=0.1)


def prompts(splits: Splits, split: str, count: int) -> set[str]:
    stream = splits.stream(split)
    tasks = [stream.next() for _ in range(count)]
    return {identity(task) for task in tasks if task is not None}


def test_no_run_trains_on_what_another_holds_out() -> None:
    held = [prompts(world(seed, first=first), "eval", 15) for seed, first in ((1, 0), (2, 0), (1, 100))]
    assert len(set.union(*held)) > 15  # each holds out others
    for seed, first in ((1, 0), (2, 0), (3, 100)):
        shown = prompts(world(seed, first=first), "train", 500) | prompts(world(seed, first=first), "demonstration", 60)
        assert len(shown) > 100 and not shown & set.union(*held)


def test_the_held_out_share_counts_all_prompts() -> None:
    tasks = [Task(id="x", env="x", messages=(Message(role="user", content=str(n)),)) for n in range(2000)]
    assert 160 < sum(can_be_held_out(task, 0.1) for task in tasks) < 240


def test_too_few_prompts_in_the_share_are_refused() -> None:
    with pytest.raises(BadInput, match="eval split"):
        world(1, prompts=20)


def game(seed: int, *, share: float = 0.0, seeds: int = 1000) -> Splits:
    """One prompt and many seeds, which the prompt does not tell."""

    def draw(split: str, index: int, attempt: int) -> Task:
        number = derived_seed(seed, split, index, attempt) % seeds
        return Task(
            id=f"{split}/{index}", env="game", messages=(Message(role="user", content="Your move."),), key=str(number)
        )

    return Splits("game", draw, held_out=200, demonstrations=100, share=share)


def test_a_game_of_one_prompt_is_split_by_its_key() -> None:
    held, shown = prompts(game(1), "eval", 200), prompts(game(1), "demonstration", 100)
    assert len(held) == 200 and len(shown) == 100
    assert not held & (shown | prompts(game(1), "train", 2000))


def test_a_held_out_share_of_keys_separates_runs_of_other_seeds() -> None:
    held = prompts(game(1, share=0.3), "eval", 200)
    assert held and not held & prompts(game(2, share=0.3), "train", 2000)


def test_too_few_keys_or_distinct_prompts_are_refused() -> None:
    with refused_at("env game", "a new key for the eval split"):
        game(1, seeds=150)

    def silent(split: str, index: int, attempt: int) -> Task:
        return Task(id=f"{split}/{index}", env="game", messages=(Message(role="user", content="Your move."),))

    with pytest.raises(BadInput, match="a new prompt for the eval split at task 1, .* give it a method key"):
        Splits("game", silent, held_out=2, demonstrations=0)


def test_a_key_is_equal_to_no_text() -> None:
    text = Task(id="a", env="x", messages=(Message(role="user", content="\x1f7"),))
    assert identity(text) == "7" and identity(replace(text, key="7")) not in ("7", "\x1f7".strip())


def test_tasks_that_differ_in_a_call_a_role_or_a_thought_are_two() -> None:
    def task(shelf: int = 1, role: str = "assistant", reasoning: str | None = None, answer: str = "hm") -> Task:
        call = ToolCall(id="c", name="look", arguments={"shelf": shelf})
        messages = (
            Message(role="user", content="What?"),
            Message(role="assistant", tool_calls=(call,), reasoning=reasoning),
            Message(role="tool", content="seen", tool_call_id="c"),
            Message(role=role, content=answer),
            Message(role="user", content="Which?"),
        )
        return Task(id="t", env="e", messages=messages)

    others = [task(shelf=2), task(role="user"), task(reasoning="x")]
    assert len({identity(other) for other in [task(), *others]}) == 4
    assert identity(task()) == identity(task(answer=" HM"))


def test_the_identity_of_a_question_is_its_words() -> None:
    """What two users say is another thing."""
    asked, system = Message(role="user", content="What  is 7?"), Message(role="system", content="Count.")
    assert prompt_content([asked]) == "what is 7?" and prompt_content([system, asked]) == "count. what is 7?"
    assert (
        len(
            {
                prompt_content([system, asked]),
                prompt_content([replace(system, role="user"), asked]),
                prompt_content([system, system, asked]),
            }
        )
        == 3
    )
    assert prompt_content([]) == ""
