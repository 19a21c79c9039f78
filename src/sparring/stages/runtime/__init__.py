"""Training and evaluation loops that several stages share: online, offline, checkpoints, metrics."""
