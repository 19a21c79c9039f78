"""Expert: a plain reply that follows every instruction of a task, found by trying combinations of clauses.

It proves that a task can be done: a task without such a reply is not used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from random import Random

from kind import ReplyPlan
from reply import folded, words_of
from vocabulary import ADVERBS, CLAUSES, FORMS, WORD_CLAUSES

TRIES = 24
"""Number of replies to try before a plan counts as impossible."""


def solve(plan: ReplyPlan, topic: str, random: Random, right: Callable[[str], bool]) -> str | None:
    """Return a reply to a plan that `right` accepts, or None if no try succeeds.

    Args:
        plan: requirements on the reply.
        topic: plural noun.
        random: source of randomness.
        right: check of a reply.
    """
    for _ in range(TRIES):
        text = _write_reply(plan, topic, random)
        if text is not None and right(text):
            return text
    return None


def _write_reply(plan: ReplyPlan, topic: str, random: Random) -> str | None:
    """Return one try, or None if too few clauses fit."""

    def fit(templates: Sequence[str], **fields: str) -> list[str]:
        texts = [_fill(template, topic=topic, **fields) for template in templates]
        return random.sample(fitting := [text for text in texts if _allowed(text, plan)], len(fitting))

    needed = _required_clauses(plan, fit)
    if needed is None:
        return None
    statements, question = needed
    general = fit(CLAUSES)
    about = [clause for clause in general if topic in clause]
    others = [clause for clause in general if topic not in clause]
    count = plan.sentences or max(plan.min_sentences, len(statements) + bool(question), 1)
    if plan.max_words:
        count = plan.sentences or plan.min_sentences
        about, others = sorted(about, key=len), sorted(others, key=len)
    if not any(topic in text for text in (*statements, question)):
        statements = [*about[:1], *statements]
    spare = [clause for clause in (*about[1:], *others) if clause not in statements]
    room = count - bool(question)
    while len(statements) < room or not plan.sentences and _num_words(statements) < plan.min_words:
        if not spare:
            return None
        statements.append(spare.pop(random.randrange(min(3, len(spare))) if plan.max_words else 0))
    while plan.sentences and _num_words([*statements, question]) < plan.min_words and spare:
        statements.append(spare.pop(0))
    return _compose(_merge(statements, max(room, 1), alone=not room, question=question), plan, topic, random)


def _required_clauses(plan: ReplyPlan, fit: Callable[..., list[str]]) -> tuple[list[str], str] | None:
    """Return clauses with the required words and forms, and the question; None if one of them cannot be written."""
    clauses: list[str] = []
    asks = plan.ends_asking or "question" in plan.forms
    questions = fit(FORMS["question"]) if asks else [""]
    for form in plan.forms:
        if form != "question":
            choice = fit(FORMS[form])
            if not choice:
                return None
            clauses.append(choice[0])
    templates = list(WORD_CLAUSES)
    for word in plan.words:
        choice = [template for template in templates if _allowed(_fill(template, word=word), plan)]
        if not choice:
            return None
        clauses.append(fit(choice, word=word)[0])
        templates = [template for template in templates if _fill(template, word=word) != clauses[-1]]
    return (clauses, questions[0]) if questions else None


def _fill(template: str, **fields: str) -> str:
    """Return a template with its fields filled in, "a" before a vowel as "an"."""
    text = template.format(**{"topic": "{topic}", **fields})
    return re.sub(r"\ba (?=[aeio])", "an ", text) if "a {" in template else text


def _allowed(text: str, plan: ReplyPlan) -> bool:
    letters = folded(text)
    if plan.letter and plan.letter in letters:
        return False
    return not plan.avoid or plan.avoid.isdisjoint(re.findall(r"[a-z]+", letters))


def _num_words(clauses: Sequence[str]) -> int:
    return sum(len(words_of(clause)) for clause in clauses)


def _merge(clauses: Sequence[str], room: int, *, alone: bool, question: str) -> list[str]:
    """Distribute the clauses over `room` sentences, joined by "and", with the question last, if there is one."""
    groups: list[list[str]] = [[] for _ in range(room)]
    for place, clause in enumerate(clauses):
        groups[place * room // max(len(clauses), room)].append(clause)
    joined = [" and ".join(group) for group in groups if group]
    if not question:
        return joined
    return [" and ".join([question, *joined]) + "?"] if alone else [*joined, question + "?"]


def _compose(clauses: list[str], plan: ReplyPlan, topic: str, random: Random) -> str:
    if plan.opening:
        clauses[0] = f"{plan.opening} {clauses[0]}"
    if plan.closing:
        last = clauses[-1]
        clauses[-1] = f"{last.removesuffix('?')} {plan.closing}{'?' if last.endswith('?') else ''}"
    if plan.initial:
        adverbs = [adverb for adverb in ADVERBS[plan.initial] if _allowed(adverb, plan)]
        random.shuffle(adverbs)
        clauses = [f"{adverbs[i % len(adverbs)]} {clause}" if adverbs else clause for i, clause in enumerate(clauses)]
    sentences = [clause[0].upper() + clause[1:] + ("" if clause.endswith("?") else plan.mark) for clause in clauses]
    text = _lay_out(sentences, plan)
    if plan.heading:
        text = f"[{topic.capitalize()}]\n{text}"
    if plan.shout:
        text = re.sub(rf"\b{plan.shout}\b", plan.shout, text, flags=re.IGNORECASE)
    if plan.case == "title":
        text = re.sub(r"[^\W_]+(?:'[^\W_]+)*", lambda match: match.group()[0].upper() + match.group()[1:], text)
    elif plan.case:
        text = text.lower() if plan.case == "lower" else text.upper()
    return f'"{text}"' if plan.quoted else text


def _lay_out(sentences: list[str], plan: ReplyPlan) -> str:
    if plan.postscript:
        return " ".join(sentences[:-1]) + f"\nP.S. {sentences[-1]}"
    if plan.layout == "lines":
        return "\n".join(sentences)
    if plan.layout == "bullets":
        return "\n".join(f"- {sentence}" for sentence in sentences)
    if plan.layout == "numbered":
        return "\n".join(f"{place}. {sentence}" for place, sentence in enumerate(sentences, 1))
    if plan.layout == "paragraphs":
        bounds = [place * len(sentences) // plan.pieces for place in range(plan.pieces + 1)]
        parts = [sentences[a:b] for a, b in itertools.pairwise(bounds)]
        return "\n\n".join(" ".join(part) for part in parts if part)
    return " ".join(sentences)
