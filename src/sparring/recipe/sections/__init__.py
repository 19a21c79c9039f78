"""Sections of a recipe that belong to no single part, one module for each family of stages."""
