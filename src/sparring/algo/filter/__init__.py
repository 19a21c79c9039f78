"""Filters: which scored groups are worth training. Torch-free."""
