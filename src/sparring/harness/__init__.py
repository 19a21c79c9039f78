"""Harnesses, which hold the conversation of a rollout: the in-process chat loop, or any Python callable."""
