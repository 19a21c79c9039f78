"""References of every algorithm, written from the papers' equations in float64 NumPy, and vectors that anyone can run."""
