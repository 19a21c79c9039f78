"""Other engines behind the same protocol."""
