"""Losses by their equations, in float64 NumPy, with vectors that anyone can hold against a framework."""
