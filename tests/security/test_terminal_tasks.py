"""Thirty kinds of tasks of recipes/terminal: who solves one earns 1; who does nothing, half of it, or nearly the right
thing earns 0."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from refusals import refused_at
from suite import short_of
from terminal_tasks import KINDS, SPEC, WORLD, drawn, of_world, played, task_of

from sparring.types import Message
from sparring.user_files.named import named

SHORT = ("follow", "sort", "commit", "pack", "spool")
"""One of each family, for the short suite."""

EACH = short_of(KINDS, SHORT)
MORE = [*range(1, 6)]
"""Seeds of the full suite, beside 0 of both."""


def reward(in_box: Any, data: dict[str, Any], commands: list[str]) -> tuple[float, list[str]]:
    found: tuple[float, list[str]] = in_box(lambda box: played(box, data, commands), **SPEC)
    return found


def test_there_are_thirty_kinds_in_five_families() -> None:
    families = [kind.family for kind in KINDS.values()]
    assert len(KINDS) == 30 and set(families) == {"files", "text", "git", "archives", "services"}
    assert all(families.count(family) >= 4 for family in families)
    assert {KINDS[name].family for name in SHORT} == set(families)


@pytest.mark.parametrize("kind", EACH)
def test_who_solves_it_earns_it_and_who_does_nothing_does_not(in_box: Any, kind: str) -> None:
    data = drawn(kind, 0)
    assert reward(in_box, data, data["commands"])[0] == 1.0
    if kind != "spool":  # its patience is tried in the full suite
        assert reward(in_box, data, [])[0] == 0.0


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_solves_every_task_and_nothing_near_it_does(in_box: Any, kind: str) -> None:
    for seed in MORE:
        data = drawn(kind, seed)
        worth, said = reward(in_box, data, data["commands"])
        assert worth == 1.0, (seed, data, said)
        assert reward(in_box, data, [])[0] == 0.0
    for seed in (0, *MORE) if KINDS[kind].family != "services" else (0,):
        data = drawn(kind, seed)
        assert len(data["near"]) >= 2
        for commands in data["near"]:
            worth, said = reward(in_box, data, commands)
            assert worth == 0.0, (seed, commands, said)


def test_tasks_differ_and_prompts_name_what_is_asked() -> None:
    terminal = of_world("Terminal")
    for kind in KINDS:
        tasks = [task_of(drawn(kind, seed)) for seed in range(40)]
        assert len({terminal().key(task) for task in tasks}) >= 30, kind
        assert all(task.data["prompt"].endswith("Change nothing else in this folder.") for task in tasks)
        for task in tasks:
            made = set(task.data["after"]) - set(task.data["before"]) - set(task.data["setup"])
            for name in made if KINDS[kind].family in ("files", "text") else ():
                assert set(name.split("/")) & set(task.data["prompt"].replace(",", " ").replace(".", " ").split()), (
                    kind,
                    name,
                )


def test_an_expert_says_one_command_after_another() -> None:
    terminal, data = of_world("Terminal"), drawn("repack", 0)
    reply = terminal().expert(task_of(data))
    messages: list[Message] = []
    said = []
    for _ in range(4):
        answer = reply(messages)
        said += [call.arguments["command"] for call in answer.tool_calls]
        messages += [answer, *(Message(role="tool", content="", tool_call_id=call.id) for call in answer.tool_calls)]
    assert said == data["commands"] and messages[-1].content == "Done."


def test_lucky_tasks_have_their_last_part_done_and_who_knows_does_not_look(in_box: Any) -> None:
    whole, lucky = drawn("move", 3), drawn("move", 3, lucky=1.0)
    assert lucky["setup"] == whole["commands"][1:] and lucky["commands"] == whole["commands"][:1]
    assert reward(in_box, lucky, lucky["commands"])[0] == 1.0
    assert reward(in_box, lucky, whole["commands"])[0] == 1.0, "who does it all"
    assert reward(in_box, lucky, [])[0] == 0.0
    knowing = drawn("follow", 3, knowing=1.0)
    assert knowing["commands"] == drawn("follow", 3)["commands"][1:]
    assert reward(in_box, knowing, knowing["commands"])[0] == 1.0


def test_settings_are_refused_by_name() -> None:
    args = of_world("Args")
    for given, told in (
        ({"families": ("file",)}, "some of files, text"),
        ({"kinds": ("mv",)}, "some of move, rename"),
        ({"families": ()}, "name one"),
        ({"lucky": 1.5}, "shares"),
    ):
        with pytest.raises(ValueError, match=told):
            args(**given)


def test_kinds_whose_programs_are_not_there_are_refused_before_anything_starts() -> None:
    check = of_world("check_programs")
    check(list(KINDS.values()))
    with refused_at(
        "env.args", "a program git for the kinds commit, branch, merge, revert, culprit, got none in /nowhere"
    ):
        check([KINDS["move"], *(kind for kind in KINDS.values() if kind.family == "git")], "/nowhere")
    check([kind for kind in KINDS.values() if not kind.programs], "/nowhere")


def test_names_are_no_parts_of_one_another() -> None:
    names = named(f"{WORLD.with_name('kind.py')}:NAMES", "kind.py")
    assert not [(a, b) for a, b in itertools.permutations(names, 2) if a in b]
