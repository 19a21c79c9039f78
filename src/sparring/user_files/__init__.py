"""Python files of the user's own that a recipe names."""
