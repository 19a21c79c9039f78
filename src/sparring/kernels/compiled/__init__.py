"""Compiled paths: C++ kernels for the CPU, built once per machine and called through ctypes."""
