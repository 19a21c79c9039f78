"""Sparring trains language-model agents with reinforcement learning."""
