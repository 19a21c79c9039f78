"""Recipes: sections, loading of a TOML file as a `RunConfig`, and refusals of invalid ones."""
