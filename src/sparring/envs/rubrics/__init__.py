"""Rubrics: rewards made of named parts with weights and gates, such as checks of text, tests in a box, functions and
judges."""
