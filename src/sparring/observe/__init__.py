"""Reports of a run: metrics, shares of time, progress, statistics and their sinks."""
