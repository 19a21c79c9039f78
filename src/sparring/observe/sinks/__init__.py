"""Sinks of metrics. Each imports its library on first use."""
