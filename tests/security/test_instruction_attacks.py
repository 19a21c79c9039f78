"""Attacks on the verdicts of recipes/instructions: replies that keep a limit by their spelling alone earn nothing, and honest
replies with the same marks, abbreviations and compounds keep what they earn."""

from __future__ import annotations

from typing import Any

import pytest
from recipe_files import recipe_file

score = recipe_file("instructions/world.py").score
ONE = {"kind": "sentences", "n": 1}
TEN = {"kind": "at_most_words", "n": 10}


def earned(text: str, instruction: dict[str, Any]) -> float:
    task = {"prompt": "Write about dogs.", "topic": "dogs", "instructions": [instruction]}
    reward = score(text, task).reward
    assert reward is not None
    return reward


def avoiding(word: str) -> dict[str, Any]:
    return {"kind": "avoid_word", "word": word}


ATTACKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "words joined by hyphens, two or three at a time": (TEN, [
        "Many-people like-dogs because-they are-loyal friends-that guard-our homes-and families-every day.",
        "Many-people-like dogs-because-they are-loyal-friends that-guard-our homes-and-families every-single-day.",
    ]),
    "words joined by hyphens, in sentences": ({"kind": "short_sentences", "n": 7}, [
        "Most-people like-dogs because-they guard-our homes. Nobody minds-that they-bark.",
        "State-of-the-art dogs guard-our old homes. Nobody minds that.",
    ]),
    "words joined by apostrophes": (TEN, [
        "Many'people like'dogs because'they are'loyal friends'that guard'our homes'and families.",
    ]),
    "words joined by capitals": (TEN, [
        "ManyPeople likeDogs becauseThey areLoyal friendsThat guardOur homesAnd familiesEvery day.",
    ]),
    "words joined by apostrophes and hyphens": (TEN, [
        "Many-people like'dogs because-they are'loyal friendsThat guard-our homes'and families.",
    ]),
    "one word cut into many": ({"kind": "at_least_words", "n": 10}, [
        "Do/gs gu/ard ho/mes ne/ar ri/vers.", "Do.gs gu.ard ho.mes ne.ar ri.vers.", "Do*gs gu*ard ho*mes ne*ar ri*vers.",
    ]),
    "sentences that end with etc.": (ONE, [
        "People like dogs and cats etc. They guard the house etc. Nobody minds that they bark.",
        "people like dogs and cats etc. they guard the house etc. nobody minds that they bark.",
        "Dogs guard our homes, farms, etc. Puppies play.",
    ]),
    "sentences that end with other abbreviations": (ONE, [
        "Dogs sleep until 5 p.m. They guard the house until 6 a.m. Nobody minds.",
        "Dogs live on our st. They guard the old dr. Nobody minds that they bark vs. Everyone likes it.",
        "Dogs live on our st. Puppies guard the old ms. Cats mind that they bark.",
        "Dogs need good food e.g. They like meat i.e. Nobody minds.",
    ]),
    "sentences that end with a letter": (ONE, [
        "Dogs need vitamin C. They are our plan B. Nobody minds that they bark.",
        "Dogs need vitamin C. Puppies are our plan B. Cats mind that they bark.",
    ]),
    "sentences without a blank between": (ONE, [
        "People like dogs.they guard the house.nobody minds that they bark.",
        "People like dogs!they guard the house?nobody minds that they bark.",
        "PEOPLE LIKE DOGS.THEY GUARD THE HOUSE.NOBODY MINDS.",
        "People like dogs.\"they guard the house.\"nobody minds that they bark.",
        "People like dogs.a good one guards the house.I never mind.",
        "People like dogs.2 guard the house.3 never bark.",
    ]),
    "full stops that are none": (ONE, [
        "People like dogs· They guard the house· Nobody minds that they bark.",
        "People like dogs • They guard the house • Nobody minds that they bark.",
    ]),
    "exclamation marks behind the last sentence alone": ({"kind": "exclaim"}, [
        "People like dogs etc. They guard plan B. Nobody minds!", "People like dogs.they guard the house.nobody minds!",
    ]),
    "several sentences a line": ({"kind": "own_lines"}, [
        "People like dogs etc. They bark.\nThey guard the house.", "People like dogs.they bark.\nThey guard the house.",
    ]),
    "a word with signs that look like its letters": (avoiding("very"), [
        f"Dogs are {word} good friends." for word in ("ver1y", "v3ry", "v€ry", "V3RY", "v3.ry", "ve7ry")
    ]),
    "a word in letters that look like it": (avoiding("also"), ["Dogs are aIso good friends.", "Dogs are a1s0 good friends."]),
    "a word with a letter in two parts": (avoiding("water"), ["Dogs like vvater all day.", "Dogs like vva7er all day."]),
    "a word with more letters": (avoiding("very"), ["Dogs are veeery good friends.", "Dogs are verrry good friends."]),
    "a masked word": (avoiding("very"), ["Dogs are v*ry good friends.", "Dogs are ve**y good friends.", "Dogs are v#ry good."]),
    "a word of which half is masked": (avoiding("great"), [
        f"Dogs are {word} old friends." for word in ("g**at", "g***at", "gr--t", "gr..t", "gr·at", "gr🐶at", "*reat", "grea*", "##eat")
    ]),
    "a word in pieces": (avoiding("very"), [
        "Dogs are ve ry good friends.", "Dogs are v er y good friends.", "Dogs are ve-\nry good friends indeed.", "Dogs are ve12ry good friends.",
    ]),
    "a word that another sign begins or ends": (avoiding("very"), [
        "Dogs are very2 good friends.", "Dogs are 2very good friends.", "Dogs are veryGood friends.", "Dogs are soVery good friends.",
    ]),
    "a word in other letters of Latin": (avoiding("good"), ["Dogs are gøød old friends.", "Dogs are g()od old friends."]),
    "an older letter": (avoiding("very"), ["Dogs are uery good friends."]),
    "a letter by what looks like it": ({"kind": "avoid_letter", "letter": "b"}, ["Dogs like 6ig houses much.", "Dogs like ßig houses much."]),
    "a letter in two parts": ({"kind": "avoid_letter", "letter": "w"}, ["Dogs vvalk along the river."]),
    "a letter under a sign": ({"kind": "avoid_letter", "letter": "x"}, ["Dogs like e%tra food a lot.", "Dogs like e*tra food a lot."]),
    "a stop with a sign behind it": (ONE, [
        f"Dogs guard the house{stop} They bark at night{stop} Nobody minds it." for stop in (".-", "./", ".,", ".🐶", ".°", ".#", ".»", ".‘", ".[", "!:")
    ]),
    "sentences without any stop": (ONE, [
        f"Dogs are our friends{stop} They guard the house{stop} Nobody minds it." for stop in ("", ",", " —", " /", " 🐶", " -", " &")
    ]),
    "no stop, and one exclamation mark": ({"kind": "exclaim"}, ["Dogs are our friends, They guard the house, Nobody minds it!"]),
    "a stop behind a number": (ONE, ["dogs guard up to 3.they live to be 12.nobody minds it."]),
    "postscripts in the middle": (ONE, ["Dogs guard the house p.s. They bark at night p.s. Nobody minds that."]),
    "abbreviations in small letters": (ONE, [
        "dogs guard our homes etc. cats mind them etc. farmers sleep all day.", "dogs sleep until 5 p.m. cats wake at 6 a.m. farmers mind it.",
    ]),
    "letters at the end, in capitals": (ONE, ["DOGS GUARD THE PLAN B. PUPPIES NEED THEIR VITAMIN C. KITTENS MIND IT ALL."]),
    "sentences in a heading": (ONE, ["[Dogs guard our homes. Nobody minds it.]\nPuppies bark at the old moon."]),
    "points of a list for sentences": ({"kind": "at_least_sentences", "n": 4}, ["- good dogs.\n- old friends.\n- warm homes.\n- long walks."]),
    "words joined by abbreviations and figures": (TEN, [
        "MANYPeople LIKEDogs BECAUSEThey are LOYALFriends THATGuard OUROld homes.", "Many people like2dogs and their4old friends that6guard our8homes now.",
    ]),
    "words joined by letters with accents": (TEN, ["Manyéèx peopleÉach dogsÉat becauseÉven loyalÉgos guardÉach homeÉver now."]),
    "other words in capitals, in part": ({"kind": "shout_word", "word": "BRIDGE"}, [
        "Dogs like a BRIDGE and SOME-thing more.", "Dogs like a BRIDGE and HOUSeS too.",
    ]),
    "brackets around a letter": ({"kind": "brackets"}, ["(a) Dogs are our good friends.", "Dogs are our good friend(s).", "Dogs are our friends ( x ) now."]),
    "a number of a point": ({"kind": "use_number"}, ["(1) Dogs are our good friends.", "1: Dogs are our good friends.", "#1 Dogs are our good friends."]),
    "a letter before each sentence": ({"kind": "same_letter", "letter": "T"}, ["T dogs are friends here. T cats mind that a lot."]),
}  # fmt: skip
CASES = [(name, text) for name, (_, texts) in ATTACKS.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_an_attack_earns_nothing(name: str, text: str) -> None:
    assert earned(text, ATTACKS[name][0]) == 0.0


HONEST = [
    (ONE, "Well-known state-of-the-art dogs guard our homes."),
    (ONE, "Dogs like meat, bones, etc. and sleep all day."),
    (ONE, "Many animals, e.g. dogs, guard our homes."),
    (ONE, "Good dogs, i.e. those that bark, guard our homes."),
    (ONE, "Dr. Smith and Mrs. Jones of Main St. like dogs."),
    (ONE, "Books by J. K. Rowling and George W. Bush have dogs."),
    (ONE, "Dogs wake at 6 a.m. and bark until 5 p.m. every day."),
    (ONE, "Dogs wake at 6 a.m. Monday and bark all day."),
    (ONE, "Dogs weigh 3.5 kg or 1,000.25 grams at birth."),
    (ONE, "Look at dogs.com or index.html to read of dogs."),
    (ONE, "In the U.S. dogs guard homes, as Ph.D. students say."),
    (ONE, "The match of dogs vs. cats is not over."),
    (ONE, "Version 2.0 of our dog barks at 10.30 in the café."),
    ({"kind": "sentences", "n": 2}, "Dogs are our friends… They guard our naïve hearts!"),
    ({"kind": "sentences", "n": 2}, "Dogs bark (a lot). “Cats do not.”"),
    ({"kind": "sentences", "n": 2}, "Do dogs bark?! They do so all day..."),
    ({"kind": "sentences", "n": 2}, "dogs guard our homes. they bark, e.g. at cats."),
    (TEN, "A well-known dog guards our home all day."),
    (TEN, "It's o'clock-free: dogs don't mind, they've time."),
    (TEN, "YouTube's dogs aren't McDonald's; they're O'Brien's own."),
    ({"kind": "at_least_words", "n": 8}, "Dogs, our well-known friends, guard homes and/or farms daily."),
    ({"kind": "short_sentences", "n": 7}, "Well-known dogs guard our homes. Nobody minds it."),
    ({"kind": "exclaim"}, "Mr. Smith likes dogs, cats, etc.! They bark at 5 p.m. daily!"),
    ({"kind": "own_lines"}, "Dogs bark, e.g. at night.\nMr. Smith minds it."),
    (avoiding("very"), "Every dog is verily varied; ever yours, 4 of them."),
    (avoiding("also"), "All so-called dogs bark, a lot so far."),
    (avoiding("tail"), "A tall dog likes the mall and the hill. ALL DOGS ARE TALL."),
    (avoiding("good"), "The dogs of God bark 24/7 in goods trains."),
    (avoiding("many"), "A dog guards man's home, and *man* feeds it."),
    (avoiding("some"), "So me and my dog went home; a sum of 50 € won."),
    (avoiding("make"), "Mark and Mike took dogs to the lake, 2 km away."),
    (avoiding("like"), "Dogs lick bikes. I keep 1 of them."),
    (ONE, "Dogs like food (meat, bones, etc.) and sleep all day."),
    (ONE, 'Dogs say "Woof!" and run home (yes!) at night.'),
    (ONE, "Many animals, e.g., dogs, guard our homes."),
    (ONE, "Prof. Smith and Mr. Jones Jr. like our No. 5 dog."),
    (ONE, "Fun fact: Some dogs in The Hague like The Beatles."),
    (ONE, 'He told me: "They are good dogs."'),
    (ONE, "dogs eat meat, bones, etc. and wake at 6 a.m. every day."),
    (ONE, "Our Dogs Guard The House And They Bark."),
    (ONE, "DOGS GUARD OUR HOMES AND THEY BARK."),
    (ONE, "Dogs are so much fun! 🐶🐶"),
    (ONE, "Dogs cost $5.50 per day.🐶"),
    ({"kind": "sentences", "n": 2}, "Dogs are so much fun. 🐶 They bark at us 🐶."),
    ({"kind": "heading"}, "[Mr. Smith's Dogs: Who Are They?]\nThey bark at us."),
    ({"kind": "brackets"}, "Dogs bark (a lot)."),
    ({"kind": "use_number"}, "3 dogs bark here."),
    ({"kind": "same_letter", "letter": "A"}, "A dog barks here. All cats mind it."),
    ({"kind": "avoid_letter", "letter": "z"}, "The 2nd dog drinks H2O and h2o at 2pm."),
    ({"kind": "avoid_letter", "letter": "b"}, "The 6th dog has 8kg, *here* and **there**."),
    ({"kind": "avoid_letter", "letter": "w"}, "A savvy dog runs."),
    (avoiding("often"), "Out of ten dogs, two bark."),
    (avoiding("many"), "Has a dog *any* home?"),
    (avoiding("good"), "My dog: a god - and a food lover."),
]


@pytest.mark.parametrize(("instruction", "text"), HONEST)
def test_honest_text_keeps_its_reward(instruction: dict[str, Any], text: str) -> None:
    assert earned(text, instruction) == 1.0


def test_odd_texts_earn_nothing_and_are_read_to_their_end() -> None:
    for text in (
        "v*" * 2_000,
        "a'b" * 2_000,
        "B. " * 5_000,
        "etc." * 2_000,
        "dogs.x" * 2_000,
        "vvv3e" * 2_000,
        "v" + "*" * 9_000,
        "ve " * 4_000,
        "they It " * 2_000,
        "a" + " -" * 4_000,
    ):
        for instruction in (avoiding("very"), ONE, TEN):
            assert earned(text, instruction) == 0.0
