"""Code that runs inside the vLLM server's own processes."""
