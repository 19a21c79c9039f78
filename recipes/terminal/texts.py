"""Tasks with text: counted, sorted, replaced, cut into columns, joined, added up, read from JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from kind import FEW, NAMES, dropped, kinds, parts, text, words


def lines(random: Random) -> dict[str, Any]:
    """How many lines a file has."""
    new, file, other = random.sample(FEW, 3)
    count = random.randint(2, 9)
    before = {file: text(words(random, count, count)), other: text(words(random, 1, 9))}
    wrong = count + random.choice((-1, 1))
    return {
        "prompt": f"Write to {new} how many lines {file} has.", "looks": 1,
        "before": before, "after": before | {new: text([count])},
        "commands": [f"wc -l {file}", f"echo {count} > {new}"],
        "near": [[f"wc -l {file}"], [f"echo {wrong} > {new}"], [f"wc -l {file} > {new}"]],
    }  # fmt: skip


def sort(random: Random) -> dict[str, Any]:
    """Two files are sorted into others."""
    a, b, c, d = random.sample(FEW, 4)
    first, second = (random.sample(FEW, random.randint(3, 5)) for _ in range(2))
    for drawn in (first, second):
        if drawn == sorted(drawn):
            drawn.reverse()  # else a copy would do
    before = {a: text(first), c: text(second)}
    after = before | {b: text(sorted(first)), d: text(sorted(second))}
    prompt = f"Write the lines of {a}, sorted, to {b} and those of {c}, sorted, to {d}."
    return parts(prompt, before, after, f"sort {a} > {b}", f"sort {c} > {d}")


def replace(random: Random) -> dict[str, Any]:
    """A word becomes another in two files."""
    a, b, word, new = random.sample(NAMES, 4)
    contents = []
    for _ in range(2):
        drawn = [*words(random, 2, 4), f"{word} {word}", word]
        random.shuffle(drawn)
        contents.append(text(drawn))
    before = dict(zip((a, b), contents, strict=True))
    after = {name: said.replace(word, new) for name, said in before.items()}
    task = parts(
        f"In {a} and {b}, replace each {word} by {new}.", before, after,
        f"sed -i s/{word}/{new}/g {a}", f"sed -i s/{word}/{new}/g {b}",
    )  # fmt: skip
    return task | {"near": [*task["near"], [f"sed -i s/{word}/{new}/ {a} {b}"]]}


def column(random: Random) -> dict[str, Any]:
    """A column of a table, by its name."""
    file, new = random.sample(NAMES, 2)
    header = random.sample(("name", "size", "city", "year"), 4)
    rows: list[list[Any]] = [[random.choice(NAMES), random.randint(10, 99), random.choice(NAMES), random.randint(1990, 2020)]
            for _ in range(random.randint(3, 6))]  # fmt: skip
    at = random.randrange(4)
    before = {file: text([",".join(map(str, row)) for row in (header, *rows)])}
    return {
        "prompt": f"The file {file} is CSV with a header. Write the values of its column {header[at]} to {new}, in their "
        "order, one a line, without the header.",
        "before": before, "after": before | {new: text([row[at] for row in rows])},
        "commands": [f"cut -d, -f{at + 1} {file} | tail -n +2 > {new}"],
        "near": [
            [f"cut -d, -f{at + 1} {file} > {new}"],
            [f"cut -d, -f{(at + 1) % 4 + 1} {file} | tail -n +2 > {new}"],
            [f"cut -d, -f{at + 1} {file} | tail -n +3 > {new}"],
        ],
    }  # fmt: skip


def join(random: Random) -> dict[str, Any]:
    """Two tables with a common key."""
    one, two, new, *keys = random.sample(NAMES, 12)
    left = {key: random.randint(10, 99) for key in keys[:6]}
    right = {key: random.choice(NAMES) for key in random.sample(keys[2:], 6)}
    both = sorted(set(left) & set(right))
    before = {
        one: text([f"{key} {left[key]}" for key in random.sample(list(left), len(left))]),
        two: text([f"{key} {word}" for key, word in right.items()]),
    }
    joined = f"sort {one} > /tmp/one; sort {two} > /tmp/two; join /tmp/one /tmp/two"
    return {
        "prompt": f"Lines of {one} are a name and a number, lines of {two} a name and a word. Write to {new}, for each name "
        "in both, a line with the name, the number and the word, sorted by name.",
        "before": before, "after": before | {new: text([f"{key} {left[key]} {right[key]}" for key in both])},
        "commands": [f"{joined} > {new}"],
        "near": [[f"{joined} | tail -n +2 > {new}"], [f"{joined} -a 1 > {new}"], [f"cat {one} {two} > {new}"]],
    }  # fmt: skip


def total(random: Random) -> dict[str, Any]:
    """Sums of groups."""
    file, new, *keys = random.sample(NAMES, 5)
    rows = [(key, random.randint(1, 50)) for key in [*keys, *keys, *random.choices(keys, k=3)]]
    random.shuffle(rows)
    sums = {key: sum(amount for name, amount in rows if name == key) for key in sorted(keys)}
    before = {file: text([f"{key},{amount}" for key, amount in rows])}
    adds = "awk -F, '{sum[$1] += $2} END {for (name in sum) print name \",\" sum[name]}'"
    return {
        "prompt": f"Each line of {file} is a name, a comma and a number. Write to {new}, for each name in alphabetical "
        "order, a line with the name, a comma and the sum of its numbers.",
        "before": before, "after": before | {new: text([f"{key},{value}" for key, value in sums.items()])},
        "commands": [f"{adds} {file} | sort > {new}"],
        "near": [[f"sort -u -t, -k1,1 {file} > {new}"], [f"{adds} {file} | sort -r > {new}"], [f"sort {file} > {new}"]],
    }  # fmt: skip


def objects(random: Random) -> dict[str, Any]:
    """Names of some objects of a list in JSON."""
    file, new, *names = random.sample(NAMES, 8)
    sizes = [*random.sample(range(10, 50), 2), *random.sample(range(51, 99), 2), *random.choices(range(10, 99), k=2)]
    random.shuffle(sizes)
    listed: list[dict[str, Any]] = [{"name": name, "size": size} for name, size in zip(names, sizes, strict=True)]
    before = {file: json.dumps(listed, indent=random.choice((None, 1))) + "\n"}

    def program(test: str) -> str:
        return f'python3 -c \'import json; [print(x["name"]) for x in json.load(open("{file}")) if {test}]\' > {new}'

    large = [each["name"] for each in listed if each["size"] > 50]
    return {
        "prompt": f"The file {file} is a list in JSON. Write to {new}, one a line and in the order of the list, the name of "
        "each object whose size is over 50.",
        "before": before, "after": before | {new: text(large)},
        "commands": [program("x[\"size\"] > 50")],
        "near": [[program("True")], [program("x[\"size\"] < 50")], *([f"printf '%s\\n' {' '.join(left)} > {new}"] for left in dropped(large))],
    }  # fmt: skip


KINDS = [
    *kinds("text", lines, sort, replace, column, join, total),
    *kinds("text", objects, programs=("python3",)),
]
