"""Command line: `main` and one file per command. A command's heavy imports wait until it runs."""
