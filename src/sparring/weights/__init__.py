"""Published weights and how they travel from trainer to engine."""
