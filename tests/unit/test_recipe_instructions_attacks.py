"""Replies that want the reward without the work: each earns nothing, or only what it truly keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from recipe_files import recipe_file

from sparring.types import Message, Outcome, Segment, Task, Trajectory

WORLD = recipe_file("instructions/world.py")
HONEST = "Rivers run down to the sea. A stone bridge stands over ours."
PROMPT = 'Write about rivers. Write exactly two sentences. Use the word "bridge". Do not use commas.'
LENIENT = [{"kind": "no_commas"}, {"kind": "avoid_word", "word": "water"}, {"kind": "at_most_words", "n": 30}]
"""Instructions that a reply which says nothing would keep."""


def data_of(*instructions: dict[str, Any], prompt: str = PROMPT) -> dict[str, Any]:
    return {"prompt": prompt, "topic": "rivers", "instructions": list(instructions)}


TASK = data_of({"kind": "sentences", "n": 2}, {"kind": "use_word", "word": "bridge"}, {"kind": "no_commas"})


def earned(text: str, *instructions: dict[str, Any]) -> float:
    reward = WORLD.score(text, data_of(*instructions) if instructions else TASK).reward
    assert reward is not None
    return reward


def test_an_honest_reply_earns_all_and_a_part_earns_a_part() -> None:
    assert earned(HONEST) == 1.0 == earned(HONEST, *LENIENT)
    assert earned("Rivers run down to the sea.") == pytest.approx(1 / 3)
    assert WORLD.score(HONEST, TASK).parts == {"substance": 1.0, "sentences": 1.0, "use_word": 1.0, "no_commas": 1.0}


NOTHING = {
    "empty": ["", "   \n ", "\u200b"],
    "only punctuation": [".", "...", "!?!?", "- - -", "()", "[ ]"],
    "sentences without words": [". . . . .", ".\n" * 5, "! ! ?", "- .\n- .", "1. .\n2. ."],
    "the prompt": [PROMPT, PROMPT.lower(), f"{PROMPT} {HONEST}", PROMPT.replace('"', ""), "Write about rivers."],
    "one word": [
        "rivers",
        "rivers " * 20,
        "Bridge. " * 9,
        "river river river the the the the.",
        "Rivers rivers bridge.",
    ],
    "one sentence many times": [
        "Rivers are near the bridge. " * 2,
        "Rivers are near the bridge.\n" * 3,
        "Rivers are near the bridge. RIVERS ARE NEAR THE BRIDGE!",
        "1. Rivers are near the bridge.\n2. Rivers are near the bridge.",
        "There are 3 rivers at the bridge. There are 4 rivers at the bridge.",
        "Near the bridge are rivers. Rivers are near the bridge.",
        "Rivers are near the bridge. Rivers are near the old bridge.",
        "Rivers are near the old bridge. Rivers are near the new bridge.",
    ],
    "invisible characters": [
        HONEST.replace("bridge", "br\u200bidge"),
        HONEST.replace("bridge", "br\u00adidge"),
        HONEST.replace("bridge", "br\u2060idge"),
        HONEST.replace("bridge", "br\u034fidge"),
        HONEST.replace("bridge", "br\u200didge"),
        HONEST.replace("bridge", "br\ufe0fidge"),
        HONEST + "\u202e",
        HONEST + "\x00",
        "\ufeff" + HONEST,
        HONEST + "\U000e0041",
    ],
    "letters of other scripts": [
        HONEST.replace("bridge", "br\u0456dge"),  # Cyrillic
        HONEST.replace("bridge", "\u0184ridge"),  # tone six, which looks like a b
        HONEST.replace("bridge", "\uff42ridge"),  # full width
        HONEST.replace("bridge", "\U0001d41bridge"),  # mathematical bold
        HONEST.replace("bridge", "\U0001f171ridge"),  # squared letter
        HONEST.replace("bridge", "br\u0131dge"),  # without its dot
        HONEST.replace("bridge", "\u24d1ridge"),  # circled letter
    ],
    "commas and full stops of other scripts": [
        HONEST.replace(".", comma)
        for comma in (
            "\uff0c",
            "\u3001",
            "\u060c",
            "\u201a",
            "\ufe50",
            "\u3002",
            "\uff0e",
            "\u0701",
            "\u2024",
            "\ua4f9",
        )
    ],
    "code, HTML and links": [
        f"{HONEST} <!-- bridge -->",
        f"{HONEST} `bridge`",
        f"```\nbridge\n```\n{HONEST}",
        HONEST.replace("bridge", "b<i>ridge</i>"),
        HONEST.replace("bridge", "br&shy;idge"),
        HONEST.replace("bridge", "br&#8203;idge"),
        f"{HONEST} [here](bridge)",
        HONEST.replace("bridge", "br\\idge"),
    ],
    "many words that pass for one": [
        "Rivers are so-long-and-old-that-nobody-knows their end.",
        "Rivers are so_long_and_old for us.",
    ],
    "another topic": ["A stone bridge stands here. We cross it now and then.", "Lamps are near a bridge."],
    "without end": ["".join(f"River {a}{b} is so. " for a in "abcdefghijk" for b in "abcdefghijk")],
}


@pytest.mark.parametrize("attack", NOTHING)
def test_an_attack_earns_nothing(attack: str) -> None:
    texts = NOTHING[attack]
    assert [text for text in texts if earned(text) or earned(text, *LENIENT)] == []


def test_a_long_piece_of_the_prompt_earns_nothing() -> None:
    prompt = "Write about rivers. Put an exclamation mark at the end of all sentences."
    data = data_of({"kind": "exclaim"}, prompt=prompt)
    assert WORLD.score("Rivers put an exclamation mark at the end!", data).reward == 0.0
    assert WORLD.score("Rivers run all the way to the sea!", data).reward == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "Rivers are wide. The footbridge is old.",
        "Rivers are wide. Bridges cross them.",
        "Rivers are wide. The foot-bridge is old.",
        "Rivers are wide. Here is a b-r-idge too.",
        "Rivers are wide. Here is a br*id*ge too.",
        "Rivers are wide. Here is a brid ge too.",
    ],
)
def test_a_hidden_required_word_does_not_count(text: str) -> None:
    assert earned(text, {"kind": "use_word", "word": "bridge"}) == 0.0
    assert earned(text, {"kind": "sentences", "n": 2}) == 1.0


@pytest.mark.parametrize(
    "word", ["water", "WATER", "wat**er**", "w.a.t.e.r", "wa-ter", "w a t e r", "wat/er", "“wat”er", "wáter", "(w)ater"]
)
def test_a_split_forbidden_word_counts(word: str) -> None:
    instruction = {"kind": "avoid_word", "word": "water"}
    assert earned(f"Rivers bring us {word} all year.", instruction) == 0.0
    assert earned("Rivers bring us fish all year.", instruction) == 1.0


@pytest.mark.parametrize("kind", ["length", "timeout"])
def test_a_reply_that_was_cut_earns_nothing(kind: str) -> None:
    async def rewarded(outcome: Outcome) -> float | None:
        world = WORLD.InstructionsEnv(WORLD.InstructionsArgs())
        await world.open(Task(id="t", env="instructions", messages=(), data=TASK), None)
        reply = Segment(
            index=0, parent=None, source="expert", tokens=(), message=Message(role="assistant", content=HONEST)
        )
        score = await world.score(Trajectory(id="r", task="t", role="policy", segments=(reply,), outcome=outcome))
        return score and score.reward

    assert asyncio.run(rewarded(Outcome(kind="completed", reason="answered"))) == 1.0
    assert asyncio.run(rewarded(Outcome(kind="truncated", reason=kind))) == 0.0


def test_a_sentence_that_is_not_finished_is_not_counted() -> None:
    cut = HONEST[: HONEST.index(" over")]
    assert WORLD.score(cut, TASK).parts["sentences"] == 0.0 and WORLD.score(cut, TASK).parts["use_word"] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        HONEST,
        "Rivers flow – “slowly” – to the café… and it’s fine; 50% of them (or 1,000) do!",
        "**Rivers** are _very_ long 🌊.",
        "Rivers are a family's joy ❤️ for all.",
        "- Rivers flow\n- Streams too",
        "The river's bank is far\u00a0away.",
        "A riverboat is on the Rivers-road by the river.",
        "[Rivers]\nThey run to the sea.",
        "The river is long. The river is wide. The river is old.",
    ],
)
def test_plain_text_of_all_sorts_has_substance(text: str) -> None:
    assert recipe_file("instructions/substance.py").is_plain(text)
    assert WORLD.says_something(WORLD.ReplyText(text), PROMPT, WORLD.TOPICS["rivers"])


@pytest.mark.parametrize(
    "text",
    [
        "Rivers are water'flows'down'the'hill'to'the'sea.",
        "Rivers are water-flows'down-the'hill always.",
        "Rivers are flowDownTheHillToTheSea always.",
        "Rivers are thewaterthatflowsdownthehilltothesea always.",
    ],
)
def test_many_words_that_pass_for_one_earn_nothing(text: str) -> None:
    assert earned(text, {"kind": "at_most_words", "n": 10}) == 0.0


@pytest.mark.parametrize("filler", ["1 2 3 4 5 6 7 8 9 10 11 12", "a b c d e f g h j k l m", "x1 x2 x3 x4 x5 x6 x7 x8"])
def test_words_that_fill_a_sentence_without_being_any_earn_nothing(filler: str) -> None:
    assert earned(f"Rivers flow down there by {filler}.", {"kind": "at_least_words", "n": 12}) == 0.0


def test_signs_made_of_letters_do_not_hide_one() -> None:
    assert earned("Rivers carry 5 \u338f of sand down.", {"kind": "avoid_letter", "letter": "k"}) == 0.0


def test_odd_texts_are_checked_in_no_time() -> None:
    for text in (
        "a-" * 20_000,
        "." * 20_000,
        "*_" * 20_000,
        "a b " * 10_000,
        "( " * 20_000,
        '".' * 20_000,
        "&a" * 20_000,
    ):
        assert earned(text) == 0.0
