"""What runs inside of the vLLM server's own processes."""
