"""Sections of a recipe that no single part owns: one module for each family of stages."""
