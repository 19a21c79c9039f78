"""Real objects for plug-in authors and our tests: a scripted engine, a virtual clock, a toy world, tiny models and
adapters. Objects that only our tests or benchmarks use are in their folders."""
