"""Adapters to engines other than the native one."""
