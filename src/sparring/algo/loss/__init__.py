"""Loss terms: each declares the quantities it needs and never sees logits."""
