"""Rows that stages train on: demonstrations, transcripts, preferences, and the check that no held-out task is among them."""
