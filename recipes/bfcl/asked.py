"""The program that asks BFCL's checker, run by BFCL's own interpreter: one JSON object a line in, one out, until its
input ends. It imports Python's library and `bfcl_eval`, and nothing of ours.

    in   {"category": ..., "functions": [...], "answer": [...], "calls": [{name: {argument: value}}, ...]}
    out  {"valid": true, "error": ""}

As in BFCL's `eval_runner`, calls must have its form and are then handed to `ast_checker`; where no function fits, there
must be none (`is_empty_output`). What `ast_checker` raises on calls that the model made up is a wrong answer, told as
`raised`: it has no verdict of its own for them, and its evaluation would end there.
"""

import json
import signal
import sys

MODEL = "Qwen/Qwen3-0.6B-FC"
"""A model of BFCL's table that writes calls as ours does, and names of functions as they are (`underscore_to_dot` is
false). It says nothing else to the checker."""


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which closes the input
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    verdict = checker()
    for line in sys.stdin:
        answers.write(json.dumps(verdict(json.loads(line))) + "\n")
        answers.flush()


def checker():
    """Return the function from a question to its answer."""
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    from bfcl_eval.utils import is_empty_output, is_function_calling_format_output

    def verdict(asked):
        calls, category = asked["calls"], asked["category"]
        if "irrelevance" in category:
            return {"valid": is_empty_output(calls), "error": ""}
        if not is_function_calling_format_output(calls):
            return {"valid": False, "error": "ast_decoder:decoder_wrong_output_format"}
        try:
            found = ast_checker(asked["functions"], calls, asked["answer"], Language.PYTHON, category, MODEL)
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            return {"valid": False, "error": f"raised:{type(error).__name__}"}
        return {"valid": found["valid"], "error": "" if found["valid"] else found["error_type"]}

    return verdict


if __name__ == "__main__":
    main()
