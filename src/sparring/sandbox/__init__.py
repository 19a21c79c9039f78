"""Boxes for what the policy runs: isolated, limited, made in milliseconds, without a daemon."""
