"""Sources of tasks: files, and mixtures of sources."""
