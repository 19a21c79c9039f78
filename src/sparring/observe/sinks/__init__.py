"""Sinks of metrics. Each imports its library when it is used."""
