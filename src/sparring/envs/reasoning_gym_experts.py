"""Scripted experts of reasoning-gym: a short program that answers the question, and the conversation around it.

A program copies its input from the question and prints the answer in its final form, so a small model only has to learn
to copy, to choose the program, and to repeat the tool's output.
"""

from __future__ import annotations

import calendar
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date

from sparring.protocols import Expert
from sparring.types import Message, Task, ToolCall

Program = Callable[[str], str]
"""Function question -> Python source that prints the answer."""


def expert_for(task: Task) -> Expert | None:
    """Return the expert of a task's dataset, which calls the python tool once and repeats its output; None if the
    dataset has no expert."""
    name = task.data["dataset"]
    if name == "calendar_arithmetic":
        program: Program = functools.partial(_calendar, year=task.data["params"].get("year", 2022))
    elif name in PROGRAMS:
        program = PROGRAMS[name]
    else:
        return None
    return functools.partial(_reply, program)


def has_expert(name: str) -> bool:
    """Return True if a dataset has an expert."""
    return name in PROGRAMS or name == "calendar_arithmetic"


def _reply(program: Program, messages: Sequence[Message]) -> Message:
    if messages[-1].role == "tool":
        return Message(role="assistant", content=messages[-1].content.strip())
    question = next(m.content for m in reversed(messages) if m.role == "user")
    return Message(
        role="assistant", tool_calls=(ToolCall(id="call_0", name="python", arguments={"code": program(question)}),)
    )


def _between(text: str, before: str, after: str = "") -> str:
    rest = text.split(before, 1)[1]
    return (rest.split(after, 1)[0] if after else rest).strip()


def _quote(text: str) -> str:
    return repr(text) if '"' in text or "\\" in text else f'"{text}"'


def _chain_sum(question: str) -> str:
    return f"print({_between(question, 'problem: ', ' =')})"


def _decimal_chain_sum(question: str) -> str:
    expression = _between(question, "problem: ", " =")
    places = max(len(digits) for digits in re.findall(r"\.(\d+)", expression) or [""])
    return f"print(round({expression}, {places}))"


def _products(question: str) -> str:
    return f"print({_between(question, 'multiplication: ', '. Give')})"


def _basic_arithmetic(question: str) -> str:
    # The library divides where it is exact, and floors where nested signs make it inexact.
    expression = max(re.findall(r"[-+*/()\d\s]+", question), key=len).strip()
    return f"print({expression.replace('/', '//')})"


def _gcd(question: str) -> str:
    return f"import math\nprint(math.gcd({_between(question, 'numbers: ', '. Give')}))"


def _lcm(question: str) -> str:
    return f"import math\nprint(math.lcm({_between(question, 'numbers: ')}))"


def _count_bits(question: str) -> str:
    return f'print(bin({_between(question, "number ", "?")}).count("1"))'


def _count_primes(question: str) -> str:
    first, last = _between(question, "between ", " (inclusive").split(" and ")
    return f"print(sum(n>1 and all(n%d for d in range(2,int(n**.5)+1)) for n in range({first},{last}+1)))"


def _fraction_simplification(question: str) -> str:
    numerator, denominator = re.findall(r"\d+", question)[:2]
    return f"from math import *\na,b={numerator},{denominator}\ng=gcd(a,b)\nprint(f'{{a//g}}/{{b//g}}')"


def _bitwise_arithmetic(question: str) -> str:
    return f"print(hex({question.splitlines()[-1].strip()}))"


def _complex_arithmetic(question: str) -> str:
    left, sign, right = re.findall(r"(\([^()]*\)) (\S) (\([^()]*\))", question)[0]
    left, right = left.replace("i", "j"), right.replace("i", "j")
    if sign in "÷/":
        return f"c={left}/{right}\nprint(complex(round(c.real),round(c.imag)))"
    return f"print({left} {'*' if sign in '×*' else sign} {right})"


def _spell_backward(question: str) -> str:
    return f"print({_quote(_between(question, 'nus): '))}[::-1])"


def _prime_factorization(question: str) -> str:
    number = _between(question, "factorization of ", ".")
    return f"n={number}\nf=[]\nd=2\nwhile n>1:\n while n%d==0:f.append(d);n//=d\n d+=1\nprint(*f,sep=' × ')"


def _base_conversion(question: str) -> str:
    match = re.search(r"convert the (\S+) number (\S+) to (\S+)", question)
    assert match is not None, "every question of base_conversion has this sentence"
    source, number, target = match.groups()
    base = {"binary": "2", "hexadecimal": "16"}
    source, target = (base.get(name, name.removeprefix("base-")) for name in (source, target))
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"[: max(16, int(target))]
    return f'n=int("{number}",{source})\ns=""\nwhile n:s="{digits}"[n%{target}]+s;n//={target}\nprint(s)'


def _number_sorting(question: str) -> str:
    numbers = _between(question, "order: ", "\n")
    reverse = ",reverse=True" if "in descending order" in question else ""
    return f"print([str(x) for x in sorted([{numbers}]{reverse})])"


def _letter_counting(question: str) -> str:
    letter = _between(question, 'the letter "', '" appear')
    text = _between(question, 'in the text: "').removesuffix('"?')
    return f"print({_quote(text)}.lower().count({_quote(letter)}))"


def _simple_equations(question: str) -> str:
    left, right = re.split(r": ", question, maxsplit=1)[1].split(" = ")
    variable = re.findall(r"[a-z]", left)[0]
    return f"f=lambda {variable}:{left}-({right.strip()})\nprint(-f(0)//(f(1)-f(0)))"


def _leg_counting(question: str) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    animals = re.findall(r"(\d+) ([a-z ]+)", _between(question, "if you have ", "?"))
    legs = [ANIMALS[name if name in ANIMALS else name.removesuffix("s")] for _, name in animals]
    return f"print({'+'.join(f'{count}*{n}' for (count, _), n in zip(animals, legs, strict=True))})"


def _power_function(question: str) -> str:
    base, exponent = _between(question, "Compute ", ". Return").split("^")
    return f'print(f"{{({base})**{exponent}:.2e}}")'


def _decimal_arithmetic(question: str) -> str:
    return f"print({question.splitlines()[-1].split(' = ')[0]})"


def _number_filtering(question: str) -> str:
    match = re.match(r"(Keep|Remove) all numbers (larger|smaller) than (\S+) in this list: (.*)", question)
    assert match is not None, "every question of number_filtering has this sentence"
    verb, than, limit, numbers = match.groups()
    test = {"Keep larger": ">", "Keep smaller": "<", "Remove larger": "<=", "Remove smaller": ">="}[f"{verb} {than}"]
    return f"print([x for x in {numbers} if float(x){test}{limit}])"


def _word_sequence_reversal(question: str) -> str:
    return f'print(", ".join({_quote(_between(question, "words: "))}.split(", ")[::-1]))'


PROGRAMS: Mapping[str, Program] = {
    "base_conversion": _base_conversion,
    "basic_arithmetic": _basic_arithmetic,
    "bitwise_arithmetic": _bitwise_arithmetic,
    "chain_sum": _chain_sum,
    "complex_arithmetic": _complex_arithmetic,
    "count_bits": _count_bits,
    "count_primes": _count_primes,
    "decimal_arithmetic": _decimal_arithmetic,
    "decimal_chain_sum": _decimal_chain_sum,
    "fraction_simplification": _fraction_simplification,
    "gcd": _gcd,
    "lcm": _lcm,
    "leg_counting": _leg_counting,
    "letter_counting": _letter_counting,
    "number_filtering": _number_filtering,
    "number_sorting": _number_sorting,
    "power_function": _power_function,
    "prime_factorization": _prime_factorization,
    "products": _products,
    "simple_equations": _simple_equations,
    "spell_backward": _spell_backward,
    "word_sequence_reversal": _word_sequence_reversal,
}
"""Programs by dataset. `calendar_arithmetic` is not among them, because its program needs the dataset's year."""

_MONTHS = "|".join(calendar.month_name[1:])
_DAYS = "|".join(calendar.day_name)


def _calendar(question: str, *, year: int) -> str:
    if "leap year" in question:
        return f"import calendar\nprint('Yes' if calendar.isleap({re.findall(r'[0-9]+', question)[0]}) else 'No')"
    if recurring := re.search(rf"the (first|second|third|fourth|last) ({_DAYS})", question):
        return _recurring(question, *recurring.groups())
    dates = _dates(question, year)
    days = re.findall(_DAYS, question)
    if re.search(r"first day of the year was|January 1 fell on|is January 1st", question):
        after, first = dates[-1].timetuple().tm_yday - 1, list(calendar.day_name).index(days[0])
        return f"import calendar\nprint(calendar.day_name[({first}+{after})%7])"
    if len(dates) == 2:
        weekday = re.search(rf"How many ({_DAYS})s|occurrences of ({_DAYS})|does ({_DAYS}) occur", question)
        condition = (
            "<5" if weekday is None else f"=={list(calendar.day_name).index(next(filter(None, weekday.groups())))}"
        )
        span = f"range({_source(dates[0])}.toordinal(),{_source(dates[1])}.toordinal()+1)"
        return f"from datetime import *\nprint(sum((d+6)%7{condition} for d in {span}))"
    offset = re.search(r"(\d+)[- ]days?", question)
    if offset is None:
        return f'from datetime import *\nprint({_source(dates[0])}.strftime("%A"))'
    sign = "-" if re.search(r"ago|before|backward", question) else "+"
    return f'from datetime import *\nprint(({_source(dates[0])}{sign}timedelta({offset.group(1)})).strftime("%A"))'


def _recurring(question: str, ordinal: str, weekday: str) -> str:
    month, year = re.findall(rf"({_MONTHS}) (\d+)", question)[0]
    column = list(calendar.day_name).index(weekday)
    place = {"first": 0, "second": 1, "third": 2, "fourth": 3, "last": -1}[ordinal]
    weeks = f"calendar.monthcalendar({year},{list(calendar.month_name).index(month)})"
    return f"import calendar\nprint([w[{column}] for w in {weeks} if w[{column}]][{place}])"


def _dates(question: str, year: int) -> list[date]:
    """Return the dates of a question in order. If the second of two dates is before the first, it is moved to the next
    year, as the library intends."""
    numeric = re.findall(r"(\d\d)/(\d\d)/(\d{4})", question)
    named = re.findall(rf"({_MONTHS}) (\d{{1,2}})\b", question)
    dates = [date(int(y), int(m), int(d)) for m, d, y in numeric]
    dates += [date(year, list(calendar.month_name).index(m), int(d)) for m, d in named]
    if len(dates) == 2 and dates[1] < dates[0]:
        dates[1] = dates[1].replace(year=year + 1)
    return dates


def _source(day: date) -> str:
    return f"date({day.year},{day.month},{day.day})"
