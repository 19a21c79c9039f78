"""Parsed reply for all checks: its words, sentences and lines."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property

MAX_HEADING = 8
"""Maximum number of words of a heading; a longer first line in square brackets is text."""

_WORD = re.compile(r"[^\W_]+(?:['’_-][^\W_]+)*")
_EMPHASIS = re.compile(r"(?<![^\W_])[*_]+(?=\S)|(?<=\S)[*_]+(?![^\W_])")
_NAME = r"(?!(?:com|org|net|edu|gov|io|co|uk|de|js|py|html?|pdf|txt)(?![^\W_]))"  # of a site or a file
_END = re.compile(
    r"(?<![.!?…])[.!?…]++[\"”’')\]]*+(?=\s|$|[A-Z][a-z])|[·•](?=\s|$)"
    rf"|(?<=[^\W\d_]{{2}})[.!?…]++[\"”’')\]]*+(?={_NAME}[^\W\d_]{{2}}|[AaIi]\s)|(?<=[^\W\d_]{{3}})[.!?…]++(?=\d)"
)
_CLOSED = re.compile(r"[.!?…][\"”’')\]]*$")
_BULLET = re.compile(r"[-*•]\s+")
_NUMBER = re.compile(r"\d+[.)]\s+")
_HEADING = re.compile(r"\[[^\[\]]+\]")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"“])(?:(?P<title>(?i:mr|mrs|ms|dr|st))|(?P<lead>(?i:vs|e\.g|i\.e))|(?P<etc>(?i:etc))"
    r"|(?P<hour>(?i:a\.m|p\.m))|(?i:p\.s)|(?P<initial>(?:[A-Z]\.|Ph\.)*[A-HJ-Z]))$"
)
_AFTER_LOWER = re.compile(r"(?:^|\s)(?!(?:and|as|by|from|of|to|with)\s)[a-z]+\s[A-Z]$")  # "plan B", not "by J"
_NEXT = re.compile(r"[\s\"“(]*([^\W_]*)")
_SUBJECTS = frozenset(
    "they it he she we you nobody everybody somebody everyone someone there the this these those many some most".split()
)
_JOINT = re.compile(r"[-_]|(?<=[a-z])(?=[A-Z])|(?<!\b[dloDLO])['’](?!(?:re|ve|ll)\b)(?=[^\W_]{2})")
_LOOKS = {signs[0]: signs for signs in "a4@ b86 e3€ g96 i1! l1!£ o0 q9 s5$ t7+ z2".split()}
_PAIRS = {"l": "(?<=[a-z])I", "m": "rn", "w": "vv"}


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
        chunks without their punctuation (`br*id*ge`, `b.r.i.d.g.e`), and runs of single letters, joined."""
        chunks = folded(self.text).split()
        joined = ["".join(filter(str.isalnum, chunk)) for chunk in chunks]
        parts = [part for chunk in chunks for part in re.findall(r"[^\W_]+", chunk)]
        alone = re.findall(r"(?<!\S)(?:\w ){2,}\w(?!\S)", " ".join(joined))
        return frozenset([*joined, *parts, *(run.replace(" ", "") for run in alone)])

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
        return first[1:-1].strip() if is_heading else ""

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
        """Return True if a reader may find the word, split (`ve-ry`), masked (`v*ry`) or disguised (`v3ry`)."""
        letters = [f"(?:[{_LOOKS.get(letter, letter)}]|{_PAIRS.get(letter, letter)})+" for letter in word]
        masked = [[*letters[:at], "[*#@$%&+=]+", *letters[at + 1 :]] for at in range(1, len(word) - 1) if len(word) > 3]
        forms = "|".join(r"[^\w\s]*\d?[^\w\s]*".join(form) for form in (letters, *masked))
        spelled = "".join(c for c in unicodedata.normalize("NFD", self.text) if not unicodedata.combining(c))
        return word in self.appearing or bool(re.search(rf"(?<![^\W_])(?i:{forms})(?![^\W_])", spelled))


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text in their own case."""
    return tuple(_WORD.findall(text))


def lowered(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case."""
    return tuple(word.casefold().replace("’", "'") for word in words_of(text))


def most_words(text: str) -> int:
    """Return the number of words of a text where each part of a joined word (`well-known`, `wellKnown`) is one, but for
    single letters (`x-ray`)."""
    parts = [part for word in words_of(text) for part in _JOINT.split(word)]
    return sum(len(part) > 1 or part in "AaIi" or part.isdigit() for part in parts)


def split_sentences(line: str) -> list[str]:
    """Split a line after full stops, question marks and exclamation marks, but not after common abbreviations."""
    sentences, begin = [], 0
    for end in _END.finditer(line):
        if end.group() == "." and _is_abbreviated(
            line[max(begin, end.start() - 40) : end.start()], line[end.end() : end.end() + 40]
        ):
            continue
        sentences.append(line[begin : end.end()].strip())
        begin = end.end()
    return [sentence for sentence in [*sentences, line[begin:].strip()] if sentence]


def _is_abbreviated(before: str, after: str) -> bool:
    """Return True if the full stop between two texts belongs to an abbreviation, and ends no sentence."""
    found, follows = _ABBREVIATION.search(before), _NEXT.match(after)
    if found is None or follows is None or found.lastgroup is None:
        return found is not None
    word = follows.group(1)
    capital, subject = word[:1].isupper(), word.casefold() in _SUBJECTS
    return {
        "title": not subject and (before[found.start("title")].isupper() or not capital),  # before a name
        "initial": not subject and not (capital and _AFTER_LOWER.search(before)),
        "lead": not (subject and capital),
        "hour": not capital or word.endswith("day"),
        "etc": not capital and not subject,
    }[found.lastgroup]


def folded(text: str) -> str:
    """Return a text in lower case without accents."""
    if text.isascii():
        return text.lower()
    letters = unicodedata.normalize("NFD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))
