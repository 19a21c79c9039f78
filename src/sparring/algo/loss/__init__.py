"""Losses: each declares the quantities that it needs and never sees logits."""
