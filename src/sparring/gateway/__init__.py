"""Sessions behind the APIs that agent programs speak: each dialect translates, and nothing else."""
