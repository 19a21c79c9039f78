"""Portable path: plain torch on the CPU, for machines without a compiler."""
