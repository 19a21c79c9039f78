"""The command line: `main` and one file per verb. Nothing heavy is imported before a verb runs."""
