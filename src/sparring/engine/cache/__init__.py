"""What the native engine keeps between two steps: pages of keys and values, recurrent states. Torch-free."""
