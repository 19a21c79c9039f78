"""Messages <-> tokens, on the `renderers` library; tool-call and reasoning parsing. Torch-free."""
