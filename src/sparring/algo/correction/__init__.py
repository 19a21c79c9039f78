"""Correction of the difference between the engine's probabilities and the trainer's."""
