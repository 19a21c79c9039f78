"""Trainer: forward, backward, step, push, save. It knows loss terms, not algorithms."""
