"""Verbs `doctor` and `image` of the command lines `sparring-boxes` and `sparring`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from sparring.errors import SparringError, refusal
from sparring.observe.terminal import say

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of boxes where they are installed alone; return its exit status, 2 if something is refused."""
    parser = argparse.ArgumentParser(prog="sparring-boxes", description="Isolated boxes for commands.")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    add_doctor(verbs)
    add_image(verbs)
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
    except (SparringError, OSError) as error:
        say(f"{parser.prog}: {error}", stream=sys.stderr)
        return 2
    return status


def add_doctor(verbs: Verbs) -> None:
    """Register the verb `doctor`."""
    doctor = verbs.add_parser(
        "doctor",
        help="say what this machine enforces for boxes, how, and what each missing thing costs",
        epilog="exit status: 0 boxes start and everything is enforced, 1 something is not, 2 no box starts",
    )
    doctor.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Print a table and return 0 if everything is enforced, 1 if something is missing, 2 if no box starts."""
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


def add_image(verbs: Verbs) -> None:
    """Register the verb `image` with its own verbs."""
    parser = verbs.add_parser("image", help="pull, list and remove images of boxes")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    pull = verbs.add_parser(
        "pull",
        help="unpack an archive of an image",
        description="Unpack an image for boxes: a folder or a tar in the layout of the Open Container Initiative, or "
        "what `docker save` writes. Layers that are here already are not unpacked again.",
        epilog="In a box one user owns every file, so owners, setuid bits and extended attributes are dropped. Devices "
        "are left out: boxes have their own.",
    )
    pull.add_argument("file", metavar="FILE", type=Path, help="the archive")
    pull.add_argument("--as", dest="name", metavar="NAME", required=True, help="its name in box.image, such as app:1")
    pull.add_argument("--most-bytes", type=int, metavar="N", help="most bytes that it may unpack to (default: 32 GiB)")
    pull.add_argument("--most-files", type=int, metavar="N", help="most files that it may have (default: 500000)")
    pull.add_argument("--user", type=int, metavar="N", help="sandbox.user of the recipes that use it (default: 65530)")
    pull.set_defaults(run=run_pull)
    verbs.add_parser("list", help="list the images that were pulled").set_defaults(run=run_list)
    remove = verbs.add_parser("remove", help="remove an image, and the layers that nothing else uses")
    remove.add_argument("name", metavar="NAME", help="its name")
    remove.set_defaults(run=run_remove)


def run_pull(args: argparse.Namespace) -> int:
    """Pull an image and print its name and digest.

    Raises:
        BadInput: the archive or the name is refused.
    """
    from sparring.observe.wait_reports import waiting
    from sparring.sandbox.config import BOX_USER
    from sparring.sandbox.images.image import Bounds
    from sparring.sandbox.images.store import ImageStore

    chosen = {"num_bytes": args.most_bytes, "num_entries": args.most_files}
    for option, value in zip(("--most-bytes", "--most-files", "--user"), (*chosen.values(), args.user), strict=True):
        if value is not None and value < 1:
            raise refusal(option, "1 or more", str(value), "leave it out for the default")
    bounds = Bounds(**{name: value for name, value in chosen.items() if value is not None})
    store = ImageStore(user=args.user or BOX_USER)
    with waiting(f"the layers of {args.file}"):
        image = store.pull(args.file, args.name, bounds, lambda text: say(text, stream=sys.stderr))
    if image.left_out:
        say(f"left out {image.left_out} devices: boxes have their own", stream=sys.stderr)
    say(f"{image.name} {image.digest}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Print a line for every image: name, digest, layers, files, megabytes."""
    from sparring.sandbox.images.store import ImageStore

    rows = [("NAME", "DIGEST", "LAYERS", "FILES", "MB")]
    for image in ImageStore().images():
        size, digest = f"{image.num_bytes / 1e6:,.1f}", image.digest.partition(":")[2][:12]
        rows.append((image.name, digest, str(len(image.layers)), f"{image.num_entries:,}", size))
    width = max(len(row[0]) for row in rows)
    for name, digest, layers, files, size in rows:
        say(f"{name:{width}}  {digest:12}  {layers:>6}  {files:>9}  {size:>9}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    """Remove an image."""
    from sparring.sandbox.images.store import ImageStore

    count = ImageStore().remove(args.name)
    say(f"removed {args.name} and {count} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
