"""A recipe: its sections, how a TOML file becomes a `RunConfig`, and what is said of a wrong one."""
