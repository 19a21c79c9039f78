"""Annotators: what other models say of the rows of an update, before credit. Torch-free."""
