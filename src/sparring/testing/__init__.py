"""A scripted engine, a virtual clock and a toy world: real objects for our tests and for plug-in authors.
Torch-free."""
