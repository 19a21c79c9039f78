"""`python -m sparring VERB ...`: the program `sparring` where it is not on the path."""

import sys

try:
    from sparring.cli.start import main
except ModuleNotFoundError as error:
    if error.name != "sparring.cli":
        raise
    problem = "expected the distribution sparring, which is not installed, got sparring-boxes alone"
    sys.stderr.write(f"sparring: {problem}; do: run sparring-boxes, or install sparring, which has the boxes\n")
    sys.exit(2)

if __name__ == "__main__":
    sys.argv[0] = "sparring"
    sys.exit(main())
