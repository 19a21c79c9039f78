"""Golden vectors: references of every algorithm, written from the papers' equations in float64 NumPy, and what they
give.

`python -m sparring.testing.golden.dump` writes them as JSON, for anyone's framework.
"""
