"""Placement of the parts of a run in processes."""
