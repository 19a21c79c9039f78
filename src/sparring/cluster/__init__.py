"""Which process runs where."""
