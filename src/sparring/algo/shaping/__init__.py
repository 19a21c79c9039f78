"""Shaping: changes the scores of groups before credit. Torch-free."""
