"""Parsed reply for all checks: its words, sentences and lines."""

from __future__ import annotations

import itertools
import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property

MAX_HEADING = 8
"""Maximum number of words of a heading; a longer first line in square brackets is text."""

_WORD = re.compile(r"[^\W_]+(?:['’_-][^\W_]+)*")
_EMPHASIS = re.compile(r"(?<![^\W_])[*_]+(?=\S)|(?<=\S)[*_]+(?![^\W_])")
_PAIRED = re.compile(r"(?<![^\W_])([*_]{1,3})(\w[^*_\n]*+)\1(?![^\W_])")
_NAME = r"(?!(?:com|org|net|edu|gov|io|co|uk|de|js|py|html?|pdf|txt)(?![^\W_]))"  # of a site or a file
_SUBJECTS = (
    "they it he she we you nobody everybody somebody everyone someone there the this these those many some most".split()
)
_GOING_ON = (
    "and or but nor as at by for from in of on to with than that which who when while where before after until till if "
    "because so is are was were has have had do does can will may every each all daily both too also".split()
)
_END = re.compile(
    r"(?<![.!?…])[.!?…]++[^\w\s.!?…]*+(?:\s[^\w\s.!?…]++(?=\s|$))*+(?=\s|$|[A-Z][a-z])|[·•](?=\s|$)"
    rf"|(?:(?<=[^\W\d_]{{2}})|(?<=\d)(?=\W+[^\W\d_]{{3}}))[.!?…]++[^\w\s.!?…]*+(?={_NAME}[^\W\d_]{{2}}|[AaIi]\s)"
    r"|(?<=[^\W\d_]{3})[.!?…]++(?=\d)"
    rf"|(?<=[a-z])[^\w\s.!?…:\"“(\[]*+(?:\s[^\w\s:\"“(\[]*+)+(?=(?:{'|'.join(map(str.title, _SUBJECTS))})\s[a-z])"
)
_CLOSED = re.compile(r"[.!?…][^\w.!?…]*+$")
_BULLET = re.compile(r"[-*•]\s+")
_NUMBER = re.compile(r"\d+[.)]\s+")
_HEADING = re.compile(r"\[[^\[\]]+\]")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"“])(?:(?P<title>(?i:mr|mrs|ms|dr|st|prof|jr|sr))|(?P<lead>(?i:vs|e\.g|i\.e))|(?P<etc>(?i:etc))"
    r"|(?P<hour>(?i:a\.m|p\.m))|(?P<number>(?i:no))|(?P<initial>(?:[A-Z]\.|Ph\.)*[A-HJ-Z]))$|^\s*(?i:p\.s)$"
)
_AFTER_WORD = re.compile(r"(?:^|\s)(?!(?i:and|as|by|from|of|to|with)\s)(?:[a-z]+|[A-Z]{2,})\s[A-Z]$")  # "plan B"
_ASIDE = re.compile(r"[!?][\"”’')\]]+")
_NEXT = re.compile(r"[\s\"“(]*([^\W_]*)")
_JOINT = re.compile(
    r"[-_]|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})|(?<=[a-z]\d)(?=[a-z]{2})"
    r"|(?<!\b[dloDLO])['’](?!(?:re|ve|ll)\b)(?=[^\W_]{2})"
)
_LOOKS = {signs[0]: signs for signs in "a4@ b86ß e3€ g96 i1! l1!£ oø0 q9 s5$ t7+ uv vu z2".split()}
_PAIRS = {"l": "(?<=[a-z])I", "m": "rn", "o": r"\(\)", "w": "vv"}
_BETWEEN, _MARKS = r"[^\w\s]{0,9}\d{0,9}[^\w\s]{0,9}", "[*#@$%&+=]{1,9}"
_UNITS = "(?!(?:st|nd|rd|th|am|pm|kg|km|cm|mm)(?![^\\W_]))"


@dataclass(frozen=True, slots=True)
class Sentence:
    """Sentence, or the unfinished rest of a line.

    Attributes:
        text: text without a list marker.
        words: words in lower case.
        closed: whether a full stop, question mark or exclamation mark ends it.
        item: whether its line is a list item.
    """

    text: str
    words: tuple[str, ...]
    closed: bool
    item: bool


@dataclass(frozen=True)
class ReplyText:
    """Reply as the checks see it, parsed on first use.

    Attributes:
        text: reply, stripped.
    """

    text: str

    @cached_property
    def plain(self) -> str:
        """The text in Unicode NFC with \\n line endings, without Markdown's marks of emphasis."""
        composed = unicodedata.normalize("NFC", self.text).replace("\u00a0", " ")
        return _EMPHASIS.sub("", re.sub(r"\r\n?", "\n", composed)).strip()

    @cached_property
    def spelled(self) -> tuple[str, ...]:
        """Words in their own case; a hyphen or underscore joins words."""
        return words_of(self.plain)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Words in lower case."""
        return lowered(self.plain)

    @cached_property
    def appearing(self) -> frozenset[str]:
        """Everything that a reader may take for a word, in lower case without accents: the parts of hyphenated words,
        chunks without their punctuation (`br*id*ge`, `b.r.i.d.g.e`)."""
        return frozenset([*self.bare.split(), *re.findall(r"[^\W_]+", folded(self.text))])

    @cached_property
    def bare(self) -> str:
        """The letters and digits of each chunk, in lower case without accents, with a blank between chunks."""
        return " ".join("".join(filter(str.isalnum, chunk)) for chunk in folded(self.text).split())

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Lines that are not blank, stripped."""
        return tuple(line.strip() for line in self.plain.splitlines() if line.strip())

    @cached_property
    def paragraphs(self) -> tuple[str, ...]:
        """Paragraphs, separated by blank lines."""
        return tuple(part.strip() for part in re.split(r"\n[ \t]*\n", self.plain.strip()) if part.strip())

    @cached_property
    def heading(self) -> str:
        """Text of a first line in square brackets, without them; "" if there is no such line."""
        first = self.lines[0] if self.lines else ""
        is_heading = _HEADING.fullmatch(first) and 0 < len(words_of(first)) <= MAX_HEADING
        return first[1:-1].strip() if is_heading and len(split_sentences(first[1:-1])) == 1 else ""

    @cached_property
    def numbers(self) -> tuple[int | None, ...]:
        """Number that each line begins with, as in a numbered list; None for other lines."""
        matches = (_NUMBER.match(line) for line in self.lines)
        return tuple(int(re.split(r"[.)]", match.group())[0]) if match else None for match in matches)

    @cached_property
    def sentences(self) -> tuple[Sentence, ...]:
        """Sentences in order. The end of a line ends a sentence; a heading is not a sentence."""
        sentences: list[Sentence] = []
        for line in self.lines[bool(self.heading) :]:
            mark = _BULLET.match(line) or _NUMBER.match(line)
            body = line[mark.end() :] if mark else line
            for text in split_sentences(body):
                sentences.append(Sentence(text, lowered(text), bool(_CLOSED.search(text)), mark is not None))
        return tuple(sentences)

    @cached_property
    def fewest_words(self) -> int:
        """Number of words where nothing between two blanks is more than one."""
        return min(len(self.words), sum(any(map(str.isalnum, chunk)) for chunk in self.plain.split()))

    def count(self, word: str) -> int:
        """Count the occurrences of a word, in any case."""
        return self.words.count(word.casefold())

    def shows(self, word: str) -> bool:
        """Return True if a reader may find the word, split (`ve-ry`, `ve ry`), masked (`v*ry`, `v**y`) or disguised
        (`v3ry`)."""
        letters = [f"(?:[{_LOOKS.get(letter, letter)}]|{_PAIRS.get(letter, letter)})+" for letter in word]
        forms = [_BETWEEN.join(letters)]
        for begin, end in itertools.combinations(range(len(word) + 1), 2) if len(word) > 3 else ():
            if 2 * (end - begin) <= len(word):
                mark = r"(?:[^\w\s]|_){1,9}" if begin > 0 and end < len(word) else _MARKS
                forms.append(_BETWEEN.join(letters[:begin]) + mark + _BETWEEN.join(letters[end:]))
        found = rf"(?:(?<![^\W\d_])|(?<=[a-z])(?=[A-Z]))(?i:{'|'.join(forms)})(?:(?![^\W\d_])|(?<=[a-z])(?=[A-Z]))"
        split = re.finditer(rf"(?<!\S){' ?'.join(word)}(?!\S)", self.bare)
        return (
            word in self.appearing
            or any(match.group() not in ("so me", "of ten") for match in split)
            or bool(re.search(found, _PAIRED.sub(r"\2", _unaccented(self.text))))
        )

    def has_letter(self, letter: str) -> bool:
        """Return True if a reader may find the letter, also as a sign in a word that looks like it or masks it."""
        look, pair = f"[{_LOOKS.get(letter, letter)}]", _PAIRS.get(letter, letter)
        hidden = (
            rf"(?<=[a-z]{{2}}){look}(?=[a-z])|(?<![^\W_])(?:{look}{_UNITS}|{pair})(?=[a-z]{{2}})|[a-z]{_MARKS}[a-z]"
        )
        return letter in folded(self.text) or bool(re.search(hidden, _unaccented(self.plain)))


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text in their own case."""
    return tuple(_WORD.findall(text))


def lowered(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case."""
    return tuple(word.casefold().replace("’", "'") for word in words_of(text))


def most_words(text: str) -> int:
    """Return the number of words of a text where each part of a joined word (`well-known`, `wellKnown`) is one, but for
    single letters (`x-ray`)."""
    parts = [part for word in words_of(_unaccented(text)) for part in _JOINT.split(word)]
    return sum(len(part) > 1 or part in "AaIi" or part.isdigit() for part in parts)


def split_sentences(line: str) -> list[str]:
    """Split a line after full stops, question marks and exclamation marks, but not after common abbreviations, and
    where the next one begins without any."""
    sentences, begin = [], 0
    for end in _END.finditer(line):
        before, after = line[begin : end.start()], line[end.end() : end.end() + 40]
        if not _goes_on(before, end.group(), after):
            sentences.append(line[begin : end.end()].strip())
            begin = end.end()
    return [sentence for sentence in [*sentences, line[begin:].strip()] if sentence]


def _goes_on(before: str, stop: str, after: str) -> bool:
    """Return True if a stop ends no sentence, because it belongs to an abbreviation or to an aside.

    Args:
        before: text from the beginning of the sentence.
        stop: the stop with the signs behind it.
        after: text behind it.
    """
    found = _ABBREVIATION.search(before[-40:]) if stop[0] == "." != stop[1:2] else None
    follows, first = _NEXT.match(after), _NEXT.match(before)
    word, is_small = follows.group(1) if follows else "", bool(first and first.group(1)[:1].islower())
    capital, subject = word[:1].isupper(), word.casefold() in _SUBJECTS
    goes_on = not capital and (not is_small or not word or word in _GOING_ON)
    if found is None:
        return goes_on and not subject and bool(word and _ASIDE.fullmatch(stop))
    return {
        None: True,
        "title": not subject and (before[-40:][found.start("title")].isupper() or not capital),  # before a name
        "initial": not subject and not (capital and _AFTER_WORD.search(before[-40:])),
        "lead": not (subject and capital),
        "hour": goes_on or word.endswith("day"),
        "number": word[:1].isdigit(),
        "etc": goes_on and not subject,
    }[found.lastgroup]


def _unaccented(text: str) -> str:
    """Return a text without accents."""
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def folded(text: str) -> str:
    """Return a text in lower case without accents."""
    if text.isascii():
        return text.lower()
    return _unaccented(text.casefold())
