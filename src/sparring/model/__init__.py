"""One Hugging Face module for trainer and engine: loading, exact numerics, quantities, saving. Needs torch."""
