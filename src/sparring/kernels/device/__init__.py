"""Path of a GPU: Triton programs, and torch for operations on single elements or rows."""
