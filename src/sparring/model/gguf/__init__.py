"""GGUF files, in which llama.cpp keeps models, as checkpoint folders of the transformers library."""
