"""The world of recipes/instructions: its expert, its splits, its settings."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from recipe_files import RECIPES, recipe_file

from sparring.envs.config import EnvConfig
from sparring.envs.registry import load_env
from sparring.errors import BadInput
from sparring.protocols import EnvFactory
from sparring.types import Task

NAME = f"{RECIPES}/instructions/world.py:Instructions"
WORLD = recipe_file("instructions/world.py")
KINDS, TOPICS, score = WORLD.KINDS, WORLD.TOPICS, WORLD.score
agree = recipe_file("instructions/catalogue.py").agree
HELD = ("numbered", "exclaim", "words_in_order")


def world(held_out: int = 68, **args: Any) -> EnvFactory:
    return load_env(EnvConfig(name=NAME, args=args, held_out=held_out, demonstrations=20))


def take(source: Any, count: int = 10**4) -> list[Task]:
    return list(islice(iter(source.next, None), count))


def kinds_of(tasks: list[Task]) -> set[str]:
    return {each["kind"] for task in tasks for each in task.data["instructions"]}


def test_the_expert_solves_every_drawn_task() -> None:
    factory = world(held_out=100)
    tasks = [*take(factory.tasks("eval", 3)), *take(factory.tasks("train", 3), 400)]
    replies = [factory.expert(task)(task.messages).content for task in tasks]
    assert len(tasks) == 500 and kinds_of(tasks) == set(KINDS)
    scores = [score(reply, task.data) for reply, task in zip(replies, tasks, strict=True)]
    assert all(each.success and each.reward == 1.0 for each in scores)
    sizes = [len(task.data["instructions"]) for task in tasks]
    assert min(map(sizes.count, (1, 2, 3))) > 100 and max(sizes) == 3
    assert {task.messages[-1].content.count(task.data["topic"]) for task in tasks} == {1}


def test_no_task_contradicts_itself() -> None:
    tasks = take(world(min_instructions=3, max_instructions=4).tasks("train", 1), 60)
    assert len(tasks) == 60
    for task in tasks:
        kinds = [KINDS[each["kind"]] for each in task.data["instructions"]]
        assert len(kinds) >= 3 and all(agree(a, b) for a in kinds for b in kinds if a is not b)


def test_topics_and_kinds_that_are_held_out_are_never_trained() -> None:
    factory = world(held_kinds=HELD)
    held_out, shown = take(factory.tasks("eval", 1)), take(factory.tasks("demonstration", 1))
    trained = [*shown, *take(factory.tasks("train", 1), 300)]
    topics = [{task.data["topic"] for task in tasks} for tasks in (held_out, trained)]
    assert len(shown) == 20 and len(topics[0]) > 20 and not topics[0] & topics[1]
    assert kinds_of(trained) == set(KINDS) - set(HELD) and kinds_of(held_out) >= set(HELD)
    other = {task.data["topic"] for task in take(factory.tasks("eval", 2))}
    assert not other & topics[1], "which topics are held out does not depend on the seed"


def test_evaluation_tasks_are_spread_evenly_over_kinds_and_tagged() -> None:
    tasks = take(world(held_kinds=HELD, max_instructions=2).tasks("eval", 1))
    counts = {tag: sum(task.tag == tag for task in tasks) for tag in {task.tag for task in tasks}}
    assert set(counts) == {f"held-{name}" if name in HELD else name for name in KINDS}
    assert set(counts.values()) == {2}
    for task in tasks:
        held = {each["kind"] for each in task.data["instructions"]} & set(HELD)
        assert held == ({task.tag.removeprefix("held-")} if task.tag.startswith("held-") else set())


def test_a_seed_draws_the_same_tasks() -> None:
    first, again, other = (take(world(2).tasks("train", seed), 10) for seed in (1, 1, 2))
    assert first == again != other


def test_kinds_and_sizes_can_be_chosen() -> None:
    tasks = take(
        world(kinds=("sentences", "use_word"), max_instructions=1, max_sentences=2, held_out=30).tasks("eval", 1)
    )
    assert kinds_of(tasks) == {"sentences", "use_word"} and {len(task.data["instructions"]) for task in tasks} == {1}
    assert {each.get("n") for task in tasks for each in task.data["instructions"]} == {None, 1, 2}


@pytest.mark.parametrize(
    ("args", "noun"),
    [
        ({"kinds": ["haiku"]}, "'haiku'"),
        ({"kinds": ["colon", "colon"]}, "twice"),
        ({"held_kinds": ["haiku"]}, "held_kinds"),
        ({"kinds": ["colon"], "held_kinds": ["colon"]}, "leave a kind"),
        ({"min_instructions": 3, "max_instructions": 2}, "min_instructions"),
        ({"min_instructions": 0}, "min_instructions"),
        ({"min_instructions": 2, "kinds": ["lowercase", "uppercase"]}, "fewer others"),
        ({"max_sentences": 0}, "max_sentences"),
        ({"held_topics": len(TOPICS)}, "held_topics"),
        ({"held_topics": 0}, "held_topics"),
        ({"topics": 3}, "topics"),
    ],
)
def test_invalid_settings_of_instructions_are_refused(args: dict[str, Any], noun: str) -> None:
    with pytest.raises(BadInput, match=f"env.args.*{noun}"):
        world(**args)


def test_a_file_of_tasks_is_refused() -> None:
    with pytest.raises(BadInput, match=r"env\.data"):
        load_env(EnvConfig(name=NAME, data="tasks.jsonl"))


def test_the_topics_are_many_and_each_has_words_of_its_own() -> None:
    assert len(TOPICS) >= 150
    assert all(len(words) >= 4 and words[0] == name for name, words in TOPICS.items())
    singular = {"wolves": "wolf", "cities": "city", "benches": "bench", "shoes": "shoe", "potatoes": "potato"}
    assert all(TOPICS[name][1] == word for name, word in singular.items() if name in TOPICS)
