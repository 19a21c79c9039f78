"""Guests: worlds of other people, in interpreters of their own or on OpenEnv servers."""
