"""Cache of the native engine: pages of keys and values, and recurrent states. Torch-free."""
