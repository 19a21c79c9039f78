"""Gates: the surrogate objective of the policy term, as a function of ratio and advantage. Torch-free until called."""
