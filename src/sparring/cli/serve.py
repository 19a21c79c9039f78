"""`sparring serve MODEL`: serves a checkpoint over HTTP, token ids in and out."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a checkpoint to other processes",
        description="Serve a checkpoint over HTTP, token ids in and out, until Ctrl-C. "
        "Endpoints: docs/engine/server.md.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a Hugging Face folder or hub name, a run, or a saved step of it like runs/quickstart/rl/best; left out: "
        "runs send their model",
    )
    parser.add_argument("--name", default="policy", help="what weight updates call the model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument("--unix", type=Path, metavar="PATH", help="listen on a socket in the file system instead")
    parser.add_argument(
        "--api-key-env", default="", metavar="NAME", help="environment variable with the key clients must send"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of weights and computation; float32")
    parser.add_argument("--numerics", choices=("exact", "fast"), help="exact: a row's bits hang on nothing else; exact")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="engine.K=V", help="a key of [engine]"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if torch can use one"
    )
    parser.add_argument("--threads", type=int, default=0, help="threads of the engine; 0: as many as there are cores")
    parser.add_argument(
        "--until-input-ends", action="store_true", help="stop when standard input ends, as that of a parent that died"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from sparring.engine.adapters.client import read_api_key
    from sparring.errors import refusal
    from sparring.launch.checkpoint import checkpoint_or_hub
    from sparring.launch.serve import ServeConfig, engine_config, serve, stop_with_input
    from sparring.observe.terminal import say

    if args.until_input_ends:
        stop_with_input()
    if args.threads < 0:
        raise refusal("--threads", "0 (one per core) or more", str(args.threads), "correct it")
    for name in ("dtype", "numerics") if args.model is None else ():
        if (value := getattr(args, name)) is not None:
            raise refusal(f"--{name}", "nothing without MODEL: the run says it", value, "leave it out, or name a MODEL")
    config = ServeConfig(
        folder=None if args.model is None else checkpoint_or_hub(args.model),
        name=args.name,
        host=args.host,
        port=args.port,
        unix=args.unix,
        api_key=read_api_key(args.api_key_env),
        dtype=args.dtype or "float32",
        numerics=args.numerics,
        device=args.device,
        engine=engine_config(args.settings),
        threads=args.threads,
    )
    serve(config, lambda url: say(f"serving {args.model or 'what a run sends'} as {args.name!r} on {url}"))
    return 0
