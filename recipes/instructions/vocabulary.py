"""Words that instructions ask for, and clauses for the expert's replies."""

from __future__ import annotations

_NOUNS = """
apple bag ball basket bell bench bird blanket boat book bottle bowl box bread bridge brother brush bucket button
cake candle card cart cat chair child circle city clock cloud coat coin cup day desk dog door dream drum evening
family farm field finger fire flag flower forest friend game garden gate gift glass grass hand hat hill home horse
hour house idea island key kitchen ladder lake lamp leaf letter light line map market minute mirror moment money
moon morning mountain name night number ocean page paint paper park path pen picture place plan plate pocket price
question rain river road rock roof room rope school seed shadow ship shoe shop sister sky snow song sound spoon
spring star stone store story street student sun table teacher tower town toy train tree valley village visitor
voice wall window winter wood word world year
"""

NOUNS = tuple(_NOUNS.split())
"""Common nouns."""

FIRST_WORDS = ("Today", "Often", "Sometimes", "Here", "Now", "Maybe", "Usually", "Everywhere", "Sadly", "Luckily")
OPENINGS = (
    "To begin with",
    "In my view",
    "As you know",
    "Most of the time",
    "In many places",
    "For a long time",
    "In the end",
    "On a good day",
    "After all",
    "At first",
)
CLOSINGS = (
    "and that is all",
    "as far as I know",
    "and so it goes",
    "at the end of the day",
    "for all of us",
    "in the long run",
    "as time goes on",
    "without a doubt",
    "once in a while",
    "more than ever",
)

ADVERBS = {
    "a": ("also", "at times", "above all", "as a rule"),
    "b": ("besides", "by day", "by night", "back then"),
    "f": ("for now", "for once", "from afar", "from time to time"),
    "i": ("indeed", "in truth", "in time", "in short"),
    "m": ("maybe", "most days", "mostly", "more and more"),
    "n": ("now", "near here", "nearly always", "next year"),
    "o": ("often", "of course", "on some days", "over time"),
    "s": ("sometimes", "still", "surely", "so far"),
    "t": ("today", "these days", "this year", "to be sure"),
    "w": ("with time", "where we live", "without fail", "with luck"),
}
"""Adverbial openings of sentences, by first letter."""

CLAUSES = (
    "many people like {topic}",
    "there is much to say about {topic}",
    "I think about {topic} a lot",
    "{topic} can make us happy",
    "children learn about {topic} at school",
    "some of us read about {topic}",
    "not everyone cares for {topic}",
    "{topic} are found all over the land",
    "old stories tell us of {topic}",
    "one can learn a lot here",
    "this has been so for ages",
    "no two of them are the same",
    "it takes time to understand them well",
    "some like them more than others do",
    "people in most countries know this",
    "our parents told us all of that",
    "that is a fine thing",
    "a little goes a long way",
    "it is fun to look at them",
    "I hope to learn more soon",
    "time will tell us the rest",
    "we see them all the time",
    "most of us agree on that",
    "the rest is left to others",
    "her friends are of another mind",
    "good ones are hard to find",
    "each season adds something of its own",
    "all this is in need of care",
)
"""Statements about any topic, or about the statement before."""

WORD_CLAUSES = (
    "I think of the {word} too",
    "there is a {word} in it as well",
    "some tell of a {word}",
    "one {word} is like no other",
    "it is not far from the {word}",
    "she drew a {word} on the side",
    "they lead us to another {word}",
    "this {word} is dear to me",
)
"""Statements with one common noun."""

FORMS = {
    "number": ("I can name 12 of them", "there are 25 of these near us", "it lasts for 3 hours"),
    "colon": ("one thing is clear: it lasts", "I am sure of this: it is good", "all can tell: that is true"),
    "semicolon": ("it is old; it is dear to me", "some are large; others are not", "I am glad; so are others"),
    "brackets": ("it is so (at least to me)", "that is true (in a sense)", "some others differ (a little)"),
    "question": ("do others like {topic}", "is there more to tell about {topic}", "are {topic} dear to all of us"),
}
"""Statements of each form, and questions without their question mark."""
