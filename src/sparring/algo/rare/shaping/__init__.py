"""Shaping rules that few recipes pick. Torch-free."""
