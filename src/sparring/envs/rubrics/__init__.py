"""Rubrics: what an answer is worth, as named parts with weights and gates; checks, tests in a box, functions,
judges."""
