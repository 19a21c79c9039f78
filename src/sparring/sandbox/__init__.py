"""Boxes for the policy's commands: isolated, limited, started in milliseconds, without a daemon."""
