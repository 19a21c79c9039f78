"""Algorithms: credit turns scores into advantages, losses turn log-probabilities into a scalar."""
