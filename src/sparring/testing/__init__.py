"""Real objects for plug-in authors and our tests: a scripted engine, a virtual clock, a toy world, tiny models and
adapters. What our tests or benchmarks alone use is beside them."""
