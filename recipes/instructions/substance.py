"""Substance: the requirement, before any instruction counts, that a reply is plain text about the topic.

Without it, text that no one would read passes the checks: only full stops, one word or sentence many times, the prompt
again, letters that look like others, invisible words.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Collection, Sequence

from reply import ReplyText, Sentence, folded, lowered, split_sentences

FEWEST_WORDS = 3
"""Minimum number of distinct words of a sentence; a list item needs one word less."""

MOST_REPEATED = 0.5
"""Maximum share of a sentence's words that are repetitions, single letters or contain digits."""

MOST_ALIKE = 0.6
"""Maximum share of words that two sentences may have in common: three of five."""

COPIED = 6
"""Number of consecutive words that count as copied if the prompt has them, outside of quotation marks."""

MOST_SENTENCES = 100
"""Maximum number of sentences, because all pairs are compared."""

PLAIN = frozenset(" \n\t\r.,;:!?'\"()[]-*_#/&%$+=@“”‘’«»–—…•·€£°\u00a0")
"""Characters of plain text, besides letters and digits."""

_LETTERS = frozenset("æœø")
_JOINERS = frozenset("\u200d\ufe0f")
_HIDDEN = re.compile(
    r"&#?\w+;|\]\(|[^\W_]_+[^\W_]|[^\W_](?:['’-][^\W_]+){3}['’-][^\W_]|(?:['’][^\W_]+){3}"
    r"|[a-z][A-Z][a-z]+[A-Z]|[^\W_]{29}"  # the longest word of a dictionary has 28 letters
)


def is_plain(text: str) -> bool:
    """Return True if a text has only visible content: Latin letters, digits, common punctuation and pictures.

    Three things are refused. Code, HTML, entities, links and characters of width zero hide text or break words. Many
    words joined by hyphens, apostrophes, underscores, capitals or nothing would count as one word. Letters and commas
    of other scripts, and signs made of letters, look like Latin ones.
    """
    composed = unicodedata.normalize("NFC", text)
    pairs = zip(" " + composed, composed, strict=False)
    return not _HIDDEN.search(composed) and all(_is_plain(character, before) for before, character in pairs)


def _is_plain(character: str, before: str) -> bool:
    if character.isascii():
        return character.isalnum() or character in PLAIN
    if character in PLAIN:
        return True
    if character in _JOINERS:
        return unicodedata.category(before) == "So"
    if character.isalpha():
        base = folded(character)
        of_latin = unicodedata.name(character, "").startswith("LATIN ")
        return of_latin and base.isalpha() and (base.isascii() or base in _LETTERS)
    name = unicodedata.name(character, "LETTER")
    shows_letters = any(map(str.isalnum, unicodedata.normalize("NFKD", character)))
    is_sign = unicodedata.category(character) == "So" and not shows_letters
    return is_sign and not {"LATIN", "LETTER", "INDICATOR"} & {*name.split()}


def says_something(reply: ReplyText, prompt: str, family: Collection[str]) -> bool:
    """Return True if a reply is plain text about its topic, in sentences of its own.

    Args:
        reply: parsed reply.
        prompt: prompt; a copy of it has no substance.
        family: words of the topic; the reply must use one.
    """
    sentences = reply.sentences
    return (
        0 < len(sentences) <= MOST_SENTENCES
        and is_plain(reply.text)
        and not set(family).isdisjoint(_base_words(reply.words))
        and all(map(_has_words, sentences))
        and not _repeats(sentences)
        and not _copies(sentences, prompt)
    )


def _base_words(words: Sequence[str]) -> set[str]:
    """Return the words and the parts of hyphenated words, each with and without a final s."""
    parts = {part for word in words for part in (word, *word.split("-"))}
    return parts | {part.removesuffix("'s").removesuffix("s") for part in parts}


def _has_words(sentence: Sentence) -> bool:
    real = {word for word in sentence.words if len(word) > 1 or word in "ai"}
    enough = len(real) >= FEWEST_WORDS - sentence.item
    spoken = {word for word in real if not any(map(str.isdigit, word))}
    return enough and len(spoken) >= (1 - MOST_REPEATED) * len(sentence.words)


def _repeats(sentences: Sequence[Sentence]) -> bool:
    """Return True if two sentences have nearly the same words, apart from numbers."""
    sets = [{word for word in sentence.words if not word.isdigit()} for sentence in sentences]
    return any(len(a & b) > MOST_ALIKE * len(a | b) for a, b in itertools.combinations(sets, 2))


def _copies(sentences: Sequence[Sentence], prompt: str) -> bool:
    """Return True if a sentence also occurs in the prompt, or has `COPIED` consecutive words of the prompt."""
    sentences_of_prompt = {lowered(sentence) for sentence in split_sentences(prompt)}
    outside = [lowered(part) for part in prompt.split('"')[::2]]
    runs = {part[i : i + COPIED] for part in outside for i in range(len(part) - COPIED + 1)}
    for sentence in sentences:
        words = sentence.words
        if words in sentences_of_prompt or any(words[i : i + COPIED] in runs for i in range(len(words) - COPIED + 1)):
            return True
    return False
