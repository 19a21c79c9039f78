"""What was published and how it travels from trainer to engine."""
