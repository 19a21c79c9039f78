"""Gate: the surrogate that the policy term makes of a ratio and an advantage. Torch-free until called."""
