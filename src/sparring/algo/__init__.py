"""Algorithms: credit rules turn scores into advantages, losses turn log-probabilities into a scalar."""
