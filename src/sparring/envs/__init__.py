"""Worlds: the `Env` base, tools, reward functions over data files, and adapters to other people's worlds."""
