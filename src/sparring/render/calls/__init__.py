"""Calls of tools between text and values: what a schema allows, what stands between tags, samples of arguments."""
