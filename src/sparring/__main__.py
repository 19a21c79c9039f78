"""`python -m sparring VERB ...`: the program `sparring` where it is not on the path."""

import sys

from sparring.cli.start import main

if __name__ == "__main__":
    sys.argv[0] = "sparring"
    sys.exit(main())
