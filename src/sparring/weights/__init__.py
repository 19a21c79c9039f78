"""Published weights and their transport from trainer to engine."""
