"""`sparring convert FILE FOLDER`: writes a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "convert",
        help="write a GGUF file as a Hugging Face folder",
        description="Convert a GGUF file, the form in which llama.cpp keeps models, into a folder that the "
        "transformers library loads: weights of float32, configuration, tokenizer, chat template and end ids. "
        "`path` of a model takes the file itself, too: it is converted once then, into the user's cache.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a GGUF file, or a folder that holds one")
    parser.add_argument("out", metavar="FOLDER", type=Path, help="the folder to write; must not exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert and print the folder.

    Raises:
        BadInput: the file cannot be converted, or FOLDER exists.
    """
    from sparring.errors import refusal
    from sparring.model.gguf.cache import gguf_file, write
    from sparring.observe.terminal import say

    if args.out.exists():
        raise refusal(
            str(args.out), "a folder that does not exist yet", "one that does", "choose another, or remove it"
        )
    file = gguf_file(args.file)
    if file is None:
        raise refusal(str(args.file), "a GGUF file, or a folder with one", "none", "check the path")
    write(file, args.out)
    say(str(args.out))
    return 0
