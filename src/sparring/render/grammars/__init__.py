"""Grammars of constrained turns: what a reply, a call or a value may be."""
