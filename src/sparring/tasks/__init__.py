"""Where tasks come from: files, and mixtures of sources."""
