"""Adapters of ecosystems: they run in a guest's interpreter, with the standard library and their ecosystem alone."""
