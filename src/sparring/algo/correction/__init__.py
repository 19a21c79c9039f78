"""Correction of the difference between the engine's and the trainer's probabilities."""
