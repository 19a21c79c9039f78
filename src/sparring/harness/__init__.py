"""Harnesses, which hold the conversation of a rollout: the chat loop, Python callables, agent programs, workers."""
