"""Path of a GPU: Triton programs, and torch where an element or a row stands alone."""
