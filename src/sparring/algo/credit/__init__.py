"""Credit: scores of groups -> advantages of tokens. Torch-free."""
