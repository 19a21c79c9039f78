"""Dialects: translators between the vendors' APIs and sessions, one module or a few per vendor."""
