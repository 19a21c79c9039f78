"""Rows that stages train on, and the check that no held-out task is among them."""
