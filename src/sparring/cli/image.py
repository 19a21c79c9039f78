"""`sparring image pull|list|remove`: the images of boxes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb with its own verbs."""
    parser = subparsers.add_parser("image", help="pull, list and remove images of boxes")
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
    from sparring.errors import refusal
    from sparring.observe.terminal import say
    from sparring.observe.waiting import waiting
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
    from sparring.observe.terminal import say
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
    from sparring.observe.terminal import say
    from sparring.sandbox.images.store import ImageStore

    count = ImageStore().remove(args.name)
    say(f"removed {args.name} and {count} layers")
    return 0
