"""Tasks become scored groups, in admission order, never more than `max_lag` steps ahead of the trainer."""
