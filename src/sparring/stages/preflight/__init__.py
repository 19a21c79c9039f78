"""Checks that refuse a run before work starts."""
