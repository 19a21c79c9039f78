"""`sparring eval RECIPE CHECKPOINT...`: evaluates checkpoints or endpoints on a recipe's held-out tasks, and compares
them with the first."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparring.launch.evaluate import Gate


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    from sparring.cli.recipe import add_recipe

    parser = subparsers.add_parser(
        "eval",
        help="evaluate checkpoints or endpoints on a recipe's held-out tasks",
        description="Sample checkpoints or endpoints on the held-out tasks of a recipe's environment, "
        "with 95 % intervals. "
        "Several are compared with the first, task by task. Stopped, the same command goes on where it was.",
        epilog="exit status: 0 done, 1 the gate closed or the evaluation failed, 2 refused",
    )
    add_recipe(parser)
    parser.add_argument(
        "subjects",
        metavar="CHECKPOINT",
        nargs="+",
        help="a Hugging Face folder, an adapter's, a run's or a saved step of it (runs/quickstart/rl/best); "
        "the URL of an endpoint; an evaluation.json of before",
    )
    parser.add_argument(
        "--env", metavar="NAME", help="an environment in place of the recipe's [env]; --set env.* adds to it"
    )
    parser.add_argument("--tasks", type=int, help="how many, in place of the recipe's [eval] tasks")
    parser.add_argument("--samples", type=int, help="of each task, in place of the recipe's [eval] samples")
    parser.add_argument("--k", metavar="K,...", help="tell pass@k and pass^k, in place of the recipe's [eval] ks")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", type=Path, help="of an endpoint; by default of the recipe's policy"
    )
    parser.add_argument(
        "--gate", metavar="X", type=float, help="exit with 1 if a figure fell by more than X against the first"
    )
    parser.add_argument("--figure", default="", help="of the gate: success, reward, pass@K or pass^K")
    parser.add_argument("--strict", action="store_true", help="the gate also closes where that cannot be excluded")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all results into this file too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate, print tables, and return the gate's exit status.

    Raises:
        BadInput: the recipe, a checkpoint or a setting is refused.
    """
    from sparring.cli.evaluation import print_results
    from sparring.cli.recipe import load_recipe
    from sparring.dashboard.report import write_report
    from sparring.errors import BadInput
    from sparring.launch.evaluate import check_writable, evaluate_subjects, evaluated_as
    from sparring.observe.results import write_results
    from sparring.observe.terminal import say

    gate = _gate(args)
    if args.json is not None:
        check_writable(args.json)
    settings = _settings(args)
    args.overrides[:] = [*_environment(args), *args.overrides, *settings]
    try:
        config = load_recipe(args)
    except BadInput as error:
        said = str(error)
        for setting, option in settings.items():
            said = said.replace(f"--set {setting}: ", f"{option}: ", 1)
        raise BadInput(said, said.partition(": expected ")[0]) from error
    subjects = [evaluated_as(config, text, args.tokenizer) for text in args.subjects]
    results = evaluate_subjects(config, subjects, gate)
    print_results(results)
    if args.json is not None:
        write_results(results, args.json)
    for subject, evaluated in zip(subjects, results.evaluations, strict=True):
        if not isinstance(subject, Path):
            say(f"report: {write_report(Path(evaluated.folder))}")
    closing = ("regressed", "undecided") if args.strict else ("regressed",)
    return int(any(compared.verdict in closing for compared in results.comparisons))


def _environment(args: argparse.Namespace) -> list[str]:
    return [] if args.env is None else [f"env={{ name = {json.dumps(args.env, ensure_ascii=False)} }}"]


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the recipe overrides of the given options, each with the option as the user wrote it."""
    keys = {"tasks": "tasks={}", "samples": "samples={}", "k": "ks=[{}]"}
    given = {option: getattr(args, option) for option in keys if getattr(args, option) is not None}
    return {f"eval.{keys[option].format(value)}": f"--{option} {value}" for option, value in given.items()}


def _gate(args: argparse.Namespace) -> Gate | None:
    """Return the gate from the arguments, or None."""
    from sparring.errors import refusal
    from sparring.launch.evaluate import Gate

    if args.gate is None:
        if args.figure or args.strict:
            raise refusal("--gate", "a margin with --figure or --strict", "none", "add --gate 0.02, say")
        return None
    if not 0 <= args.gate < float("inf"):
        raise refusal(
            "--gate", "a margin of 0 or more", str(args.gate), "give the largest fall of the figure that passes"
        )
    return Gate(margin=args.gate, figure=args.figure)
