"""Preference losses that few recipes pick."""
