"""Filters: select the scored groups that are trained. Torch-free."""
