"""Annotators: compute the per-token values that credit rules and losses read. Torch-free."""
