"""Writes what recipes/smollm2-sums.toml learns from: `python recipes/sums/prepare.py gsm8k-test.jsonl data/sums`.

The file is test.jsonl of github.com/openai/grade-school-math (MIT), 1,319 rows `{"question": ..., "answer": ...}` whose
answers carry their sums as `<<16-3-4=9>>` and end in `#### 18`. It is split here, by a digest of the question, into
`held-out.jsonl` and rows of training, so a result on them compares with no published score. `shown.jsonl` holds a
conversation for every training row whose sums compute its answer: one call of python, with a line for each sum that
names earlier results by their letters, then the answer. `short.jsonl` has the training rows of at most three sums, for
a model that never solves longer ones.
"""

import ast
import hashlib
import json
import operator
import re
import sys
from pathlib import Path

ROWS, HELD_OUT, SHORT = 1319, 400, 3
SYSTEM = "Call python with a program that prints the answer. Then write the answer as a number."
NOTE = re.compile(r"<<([^<>=]+)=[^<>]*>>")
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(sum_, results):
    """Return what a sum of numbers and letters comes to, as Python computes it; `results` are the letters' values.
    Raises ValueError where it is none."""

    def computed(node):
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=letter):
                return results[LETTERS.index(letter)]
            case ast.UnaryOp(op=ast.USub(), operand=of):
                return -computed(of)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](computed(left), computed(right))
        raise ValueError(f"expected a sum, got {sum_!r}")

    try:
        return computed(ast.parse(sum_, mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"expected a sum, got {sum_!r}: {error}") from error


def program_of(worked):
    """Return the program of a worked answer, and the text that it prints. Raises ValueError where its sums are none."""
    lines, results = list[str](), list[float]()
    for sum_ in NOTE.findall(worked):
        sum_ = sum_.replace(",", "").strip()
        if re.search("[a-z]", sum_):
            raise ValueError(f"expected numbers, got {sum_!r}")
        named = NUMBER.sub(lambda number: _name(float(number[0]), results) or number[0], sum_)
        results.append(value(named, results))
        lines.append(f"{LETTERS[len(results) - 1]} = {named}")
    if not 1 <= len(results) < len(LETTERS):
        raise ValueError(f"expected 1 to {len(LETTERS) - 1} sums, got {len(results)}")
    return "\n".join([*lines, f"print({LETTERS[len(results) - 1]})"]), str(results[-1])


def _name(number, results):
    """Return the letter of the latest earlier result that is `number`, or None."""
    return next((LETTERS[at] for at in reversed(range(len(results))) if abs(results[at] - number) < 1e-9), None)


def shown(row):
    """Return the conversation of a row, or None where its sums do not compute its answer."""
    worked, _, answer = row["answer"].partition("####")
    answer = answer.strip().replace(",", "")
    try:
        program, printed = program_of(worked)
    except ValueError:
        return None
    if float(printed) != float(answer):
        return None
    call = {"id": "call_0", "type": "function", "function": {"name": "python", "arguments": {"code": program}}}
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": printed},
        {"role": "assistant", "content": answer},
    ]


def main():
    """Write the three files."""
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_file():
        sys.exit(f"{__doc__.splitlines()[0]}\nexpected the rows' file and a folder to write, got {sys.argv[1:]}")
    source, folder = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in source.read_text().splitlines() if line.strip()]
    if len(rows) != ROWS or any(row.keys() != {"question", "answer"} for row in rows):
        sys.exit(f"{source}: expected the {ROWS} rows of GSM8K's test.jsonl, each a question and an answer, got others")
    rows.sort(key=lambda row: hashlib.sha256(row["question"].encode()).hexdigest())
    held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]
    conversations = [{"messages": messages} for row in train if (messages := shown(row)) is not None]
    short = [row for row in train if 1 <= len(NOTE.findall(row["answer"])) <= SHORT]
    folder.mkdir(parents=True, exist_ok=True)
    for name, written in (("held-out", held_out), ("short", short), ("shown", conversations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        print(f"{folder / name}.jsonl: {len(written)} rows")


if __name__ == "__main__":
    main()
