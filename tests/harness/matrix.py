"""Write the matrix of docs/agents.md: every client plays one conversation on a scripted policy (`make test-harness`)."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

from agents import PROGRAMS, ROOT, Played
from clients import CLIENTS, Client, broken_stream, compacted, malformed, plain

from sparring.errors import BadInput

PAGE = ROOT / "docs/agents.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of the matrix -->"
HEAD = (
    "client",
    "version",
    "dialect",
    "turns",
    "branches",
    "malformed: turns",
    "branches",
    "reasons",
    "labels",
    "full context",
    "broken stream",
    "sampled",
    "exact",
)


CUT_BYTES = 900
"""Bytes of an answer behind which its connection is closed."""


def version(client: Client) -> str:
    """The version that is installed; empty where none is."""
    npm = PROGRAMS / "node_modules" / client.package / "package.json"
    if npm.is_file():
        return str(json.loads(npm.read_text())["version"])
    name = client.package.replace("-", "_")
    found = sorted(PROGRAMS.glob(f"venv/lib/python*/site-packages/{name}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""


def counted(values: list[str]) -> str:
    counts = Counter(values)
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "-"


def full_context(client: Client) -> tuple[str, list[Played]]:
    """What becomes of a conversation that outgrows its context, and the play of it, if there is one."""
    if client.compaction is None:
        return "none", []
    played = compacted(client)
    summaries = sum(segment.label == "compaction" for segment in played.segments)
    went_on = (played.ending, played.reward) == ("answered", 1.0)
    word = "summary" if summaries == 1 else "summaries"
    return f"{summaries} {word}, {played.branches} branches" if went_on and summaries else "ends", [played]


def cut(client: Client) -> tuple[str, list[Played]]:
    """What becomes of a reply whose connection is closed in the middle, and the play of it."""
    played, cuts = broken_stream(client, CUT_BYTES)
    if cuts.left:
        return "not cut", [played]
    if (played.ending, played.reward, played.turns) != ("answered", 1.0, 2):
        return "another sample" if played.turns > 1 else "ends", [played]
    return "same turn", [played]


def row(client: Client) -> tuple[str, ...]:
    """One line of the matrix."""
    try:
        result, other = plain(client), malformed(client)
        (full, compaction), (broken, cuts) = full_context(client), cut(client)
    except BadInput as error:
        return (client.preset, *[""] * (len(HEAD) - 2), f"unverified: {error}")
    if result.finished.rollout.outcome.kind != "completed" or not result.turns:
        failure = result.finished.rollout.outcome.failure
        why = failure.message if failure is not None else result.ending
        last = why.strip().splitlines()[-1][:160].replace("|", "/")
        return (client.preset, version(client), client.dialect, *[""] * (len(HEAD) - 4), f"unverified: {last}")
    segments = (*result.segments, *other.segments)
    sampled = [segment for segment in segments if segment.model is not None]
    reasons = [segment.fork.reason for segment in segments if segment.fork is not None]
    return (
        client.preset,
        version(client),
        client.dialect,
        str(result.turns),
        str(result.branches),
        str(other.turns),
        str(other.branches),
        counted(reasons),
        counted([segment.label for segment in sampled]),
        full,
        broken,
        str(sum(len(segment.tokens) for segment in sampled)),
        f"{min(played.exact for played in (result, other, *compaction, *cuts)):.0%}",
    )


def main() -> int:
    """Write the matrix; 1 where a client that ran is not exact."""
    rows = []
    for client in CLIENTS:
        rows.append(row(client))
        print("  ".join(rows[-1]))
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD), *rows)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    if "latest" in sys.argv[1:]:
        old = dict(
            line.strip("| ").split(" | ", 1) for line in rest.partition(END)[0].splitlines() if line.startswith("|")
        )
        for name, *cells in rows:
            now, before = " | ".join(cells), old.get(name, "nothing")
            print(f"{name}: as before" if now == before else f"{name}: was {before}; is {now}")
        return int(any(cells[-1] != "100%" for cells in rows))
    after = rest.partition(END)[2]
    table = re.sub(r" +\|", " |", "\n".join(lines))
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    return int(any(cells[-1] != "100%" and not cells[-1].startswith("unverified") for cells in rows))


if __name__ == "__main__":
    sys.exit(main())
