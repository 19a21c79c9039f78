"""Golden vectors: what an algorithm must give for what inputs, from references that share no code with it.

`python -m sparring.testing.golden.dump` writes them as JSON, for anyone's framework.
"""
