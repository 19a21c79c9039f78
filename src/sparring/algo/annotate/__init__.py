"""Annotators: what another model says of samples, per token. Torch-free."""
