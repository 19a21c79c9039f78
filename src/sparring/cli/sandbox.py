"""`sparring sandbox doctor`: what this machine enforces for boxes."""

from __future__ import annotations

import argparse
import textwrap


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb with its own verb."""
    parser = subparsers.add_parser("sandbox", help="say what this machine enforces for boxes")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    doctor = verbs.add_parser(
        "doctor",
        help="say what this machine enforces for boxes, how, and what each missing thing costs",
        epilog="exit status: 0 boxes start and everything is enforced, 1 something is not, 2 no box starts",
    )
    doctor.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Print a table and return 0 if everything is enforced, 1 if something is missing, 2 if no box starts."""
    from sparring.observe.terminal import say
    from sparring.sandbox.doctor import examine

    findings = examine()
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        say(f"{'yes' if finding.holds else 'NO ':3}  {finding.what:{width}}  {finding.how}")
        for line in textwrap.wrap(finding.cost, 110 - width):
            say(f"     {'':{width}}    {line}")
    if not findings[0].holds:
        return 2
    return 0 if all(finding.holds for finding in findings) else 1
