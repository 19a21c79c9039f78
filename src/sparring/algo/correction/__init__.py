"""Correction: what the policy term makes of the difference between the engine's probabilities and the trainer's."""
