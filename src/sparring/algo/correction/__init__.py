"""What the policy term makes of the difference between the probabilities of the engine and the trainer."""
