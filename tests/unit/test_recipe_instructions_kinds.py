"""Every kind of instruction, on replies chosen by hand: what keeps it, and what comes near and does not."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from recipe_files import recipe_file

CATALOGUE, REPLY = recipe_file("instructions/catalogue.py"), recipe_file("instructions/reply.py")
WORLD = recipe_file("instructions/world.py")
KINDS, agree = CATALOGUE.KINDS, CATALOGUE.agree
PAGE = Path(__file__).resolve().parents[2] / "docs/instructions.md"
TWO = "Rivers are long. They flow to the sea."

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "sentences",
        {"n": 2},
        [TWO, "Mr. Smith likes rivers. Do you?", '"Rivers flow." He said so.', "They fall 3.5 metres. So it is!"],
        [
            "Rivers are long.",
            f"{TWO} They end.",
            "Rivers are long. They flow to",
            "Rivers are long. They flow.They end.",
        ],
    ),
    ("at_least_sentences", {"n": 2}, [TWO, f"{TWO} They end."], ["Rivers are long", "Rivers are long. They flow"]),
    ("at_most_words", {"n": 8}, [TWO, "Don't go."], [f"{TWO} Yes.", "One.two.three.four.five.six.seven.eight.nine."]),
    ("at_least_words", {"n": 8}, [TWO, f"{TWO} Yes."], ["Rivers are long. They flow to-the-sea.", "a - b - c - d -"]),
    (
        "short_sentences",
        {"n": 5},
        [TWO, "Rivers are long.\nThey flow"],
        ["Rivers are long.", "Rivers are long. They flow to the blue sea."],
    ),
    (
        "use_word",
        {"word": "bridge"},
        ["A bridge is near.", "BRIDGE!", "the **bridge**", "“Bridge”, he said"],
        [
            "Bridges are near.",
            "The footbridge is old.",
            "A foot-bridge.",
            "b-r-i-d-g-e",
            "A bri dge",
            "foot_bridge",
            "",
        ],
    ),
    (
        "use_two_words",
        {"first": "lamp", "second": "coat"},
        ["A coat and a lamp.", "A lamp, a coat."],
        ["A lamp.", "Lamps and coats.", "A lampcoat."],
    ),
    (
        "word_times",
        {"word": "lamp", "n": 2},
        ["A lamp and a lamp.", "Lamp! My lamp and lamps."],
        ["A lamp.", "A lamp, a lamp, a lamp.", "A lamp and lamps."],
    ),
    (
        "words_in_order",
        {"first": "lamp", "second": "coat"},
        ["A lamp and a coat.", "Lamp, coat, lamp."],
        ["A coat and a lamp.", "A lamp.", "A coat."],
    ),
    (
        "avoid_word",
        {"word": "water"},
        ["Rivers are wet.", "Waters run.", "Waterfalls roar."],
        [
            "Water!",
            "The wa**t**er runs.",
            "w.a.t.e.r",
            "w a t e r",
            "wat-er",
            "a water-fall",
            "wàter",
            "the_water_",
            "<b>wat</b>er water",
            "/water/",
        ],
    ),
    ("avoid_letter", {"letter": "z"}, ["Rivers are long."], ["A zoo.", "ZOO", "a ž here"]),
    ("lowercase", {}, ["rivers are long. i know 2."], ["Rivers are long.", "rivers ARE", "123", ""]),
    ("uppercase", {}, ["RIVERS ARE LONG. I KNOW 2."], ["RIVERS ARE LONG. i know", "123", ""]),
    (
        "title_case",
        {},
        ["Rivers Are Long.", "Don't Go 2 Times"],
        ["Rivers are Long.", "RIVERS ARE LONG.", "RIVERS ARE Long.", ""],
    ),
    (
        "shout_word",
        {"word": "LAMP"},
        ["I see a LAMP.", "A LAMP! I see the LAMP."],
        ["I see a lamp.", "I see A BIG LAMP.", "THE LAMP IS ON.", "LAMPS are on."],
    ),
    ("no_commas", {}, [TWO], ["Rivers, lakes.", "1,000 rivers"]),
    ("ask_question", {}, ["Is it so? It is.", '"Is it so?" Yes.'], [TWO, "It is ?so."]),
    ("exclaim", {}, ["Rivers are long! They flow!", '"It flows!"'], [TWO, "Rivers are long! They flow", "It! is."]),
    (
        "brackets",
        {},
        ["It is (in a way) so."],
        ["It is so.", "It is () so.", "It is (...) so.", "It is :( so.", "[a]", "(1) It is so."],
    ),
    ("semicolon", {}, ["It is old; it is good."], ["It is old.", "; it is", "It is;", "a;b"]),
    ("colon", {}, ["One thing: it is.", 'He said: "Yes."'], ["It is.", "It is:", ": it", "At 12:30 it is."]),
    (
        "quoted",
        {},
        ['"Rivers are long."', "“Rivers are long.”", '"Rivers.\nLakes."'],
        ["Rivers are long.", '"Rivers are long.', '"A" and "b"', '""', '"..."', "'Rivers'"],
    ),
    (
        "use_number",
        {},
        ["There are 7 here.", "1,000 rivers flow.", "- I know 3"],
        ["There are seven.", "1. Rivers\n2. Lakes", "the b2b"],
    ),
    (
        "bullets",
        {"n": 2},
        ["- Rivers flow\n- They end", "- Rivers flow\n\n- They end"],
        [
            "- Rivers flow",
            "Points:\n- Rivers flow\n- They end",
            "-Rivers\n-Lakes",
            "* Rivers flow\n* They end",
            "- a\n- b\n- c",
            "Rivers - and - lakes",
        ],
    ),
    (
        "numbered",
        {"n": 2},
        ["1. Rivers flow\n2. They end", "1) Rivers\n2) Lakes"],
        ["1. Rivers flow", "1. Rivers\n3. Lakes", "2. a\n1. b", "1. a 2. b", "Here:\n1. a\n2. b", "1. a\n1. b"],
    ),
    (
        "paragraphs",
        {"n": 2},
        ["Rivers are long.\n\nThey flow.", "[Rivers]\n\nRivers are long.\n \nThey flow.", "Rivers are.\r\n\r\nSo."],
        [
            "Rivers are long.\nThey flow.",
            TWO,
            "Rivers.\n\nThey.\n\nFlow.",
            "Rivers are long.\n\n",
            "Rivers\n\nThey flow.",
        ],
    ),
    (
        "own_lines",
        {},
        ["Rivers are long.\nThey flow.", "[Rivers]\nThey are long.\nThey flow."],
        [TWO, "Rivers are long.", "Rivers are\nlong.", "Rivers are long. They flow.\nSo it is."],
    ),
    (
        "heading",
        {},
        ["[Long Rivers]\nRivers are long."],
        [
            "[Long Rivers]",
            "Long Rivers\nRivers are long.",
            "[Rivers] are long.",
            "[]\nThey flow.",
            "They flow.\n[Rivers]",
        ],
    ),
    (
        "first_word",
        {"word": "Today"},
        ["Today rivers flow.", "today, it is.", '"Today it is."'],
        ["Rivers flow today.", "Today.", "Today. Rivers flow.", "Todays news.", ""],
    ),
    (
        "begin_with",
        {"phrase": "In my view"},
        ["In my view, rivers flow.", "IN MY VIEW IT IS."],
        ["In my opinion it is.", "It is, in my view.", "In my view.", "In my. View is good."],
    ),
    (
        "end_with",
        {"phrase": "and that is all"},
        ["Rivers flow and that is all.", "It flows, AND THAT IS ALL!", '"It is and that is all."'],
        ["And that is all.", "It is and that is all of it.", "That is all.", "It flows. And that is all.", ""],
    ),
    ("end_question", {}, ["It is. Is it?", '"Is it?"'], ["Is it? It is.", "It is.", "Is it? Yes", ""]),
    (
        "same_letter",
        {"letter": "S"},
        ["Some flow. Streams do too.", "some go.\nsome end."],
        ["Some flow.", "Some flow. Rivers too.", "S", ""],
    ),
    (
        "postscript",
        {},
        ["Rivers flow.\nP.S. Bring a coat.", "It is.\n\nP.S. I like it."],
        ["Rivers flow. P.S. Bring a coat.", "P.S. Bring a coat.", "It is.\nP.S.", "It is.\nP.S. I like.\nBye to you."],
    ),
]


def test_every_kind_has_its_cases() -> None:
    assert [name for name, *_ in CASES] == list(KINDS) and len(KINDS) >= 20


def test_the_page_names_every_kind() -> None:
    text = PAGE.read_text()
    table = text.partition("## The kinds")[2].partition("Each has")[0]
    assert re.findall(r"`(\w+)`", table) == list(KINDS)
    assert f"topics, of {len(WORLD.TOPICS)}," in text and f"for each of {len(KINDS)}\n" in text


@pytest.mark.parametrize(("name", "params", "right", "wrong"), CASES, ids=[name for name, *_ in CASES])
def test_only_right_replies_follow_a_kind(
    name: str, params: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    kept = {text: KINDS[name].kept(REPLY.ReplyText(text), params) for text in [*right, *wrong]}
    assert [text for text in right if not kept[text]] == []
    assert [text for text in wrong if kept[text]] == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_has_several_wordings_with_its_drawn_parameters(kind: Any) -> None:
    random, scope = Random(1), WORLD.Scope(family=WORLD.TOPICS["rivers"], max_sentences=4)
    said, drawn = set(), []
    for _ in range(60):
        params = kind.draw(random, scope)
        WORLD.ReplyPlan().require(kind.plan(params))
        drawn.append(params)
        said.add(kind.say(params, random))
    assert len(said) >= 2
    assert all(text.endswith(".") and "{" not in text and " sentences" not in text[:10] for text in said)
    assert all(str(params[key]) in kind.say(params, random) for params in drawn for key in params if key != "n")


def test_the_plural_follows_the_number() -> None:
    said = {n: {KINDS["sentences"].say({"n": n}, Random(seed)) for seed in range(20)} for n in (1, 3)}
    assert all("one sentence" in text and "sentences" not in text for text in said[1])
    assert all("three sentences" in text for text in said[3])


def test_contradicting_kinds_are_incompatible() -> None:
    pairs = [
        ("lowercase", "uppercase"),
        ("lowercase", "shout_word"),
        ("sentences", "bullets"),
        ("bullets", "numbered"),
        ("bullets", "begin_with"),
        ("exclaim", "ask_question"),
        ("exclaim", "end_question"),
        ("end_with", "end_question"),
        ("quoted", "first_word"),
        ("heading", "begin_with"),
        ("at_most_words", "at_least_words"),
        ("postscript", "own_lines"),
        ("same_letter", "postscript"),
        ("use_word", "use_word"),
    ]
    assert [pair for pair in pairs if agree(KINDS[pair[0]], KINDS[pair[1]])] == []
    assert agree(KINDS["use_word"], KINDS["no_commas"])
    assert "uppercase" not in CATALOGUE.companions(["lowercase"], list(KINDS))
    assert CATALOGUE.can_stand_with("lowercase", ["uppercase", "colon"], 2) and not CATALOGUE.can_stand_with(
        "lowercase", ["uppercase"], 2
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is 3.5 m. So?", 2),
        ("Well... yes. No", 3),
        ("At 5 p.m. we go.", 1),
        ('"Go!" he said.', 2),
        ("", 0),
        ("...", 1),
    ],
)
def test_sentences_are_split(text: str, count: int) -> None:
    assert len(REPLY.split_sentences(text)) == count
