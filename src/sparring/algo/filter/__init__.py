"""Filters: the choice of scored groups that are trained. Torch-free."""
