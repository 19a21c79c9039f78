"""Sections of a recipe that belong to no single part, a module per family of stages."""
