"""Annotators: values per token that a credit rule or a loss asks for. Torch-free."""
