"""Shaping: scores of groups -> other scores, before credit. Torch-free."""
