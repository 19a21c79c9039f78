"""Ratio: how much likelier a token, a turn or a sequence has become. Torch-free until called."""
