"""Credit rules that few recipes pick. Torch-free."""
