"""Modules that run inside bubblewrap, on the interpreter of the boxes (>= 3.9). They use the standard library only, and
nothing of Sparring but each other: the fork server gets them as text."""
