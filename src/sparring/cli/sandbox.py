"""`sparring sandbox doctor` and `sparring image`: the verbs of boxes."""

from __future__ import annotations

from sparring.sandbox.verbs import Verbs, add_doctor, add_image


def add(subparsers: Verbs) -> None:
    """Register the verbs."""
    add_image(subparsers)
    parser = subparsers.add_parser("sandbox", help="say what this machine enforces for boxes")
    add_doctor(parser.add_subparsers(title="verbs", metavar="VERB", required=True))
