"""Gates that few recipes pick. Torch-free until called."""
