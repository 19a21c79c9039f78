"""Task sources: files, and mixtures of sources."""
