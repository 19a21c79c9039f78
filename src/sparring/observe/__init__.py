"""Reports of a run: metrics, time shares, progress, intervals and the sinks they go to."""
