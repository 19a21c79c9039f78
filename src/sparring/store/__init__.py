"""Durable record of a run: turns, groups, outcomes, metrics, events and checkpoint manifests."""
