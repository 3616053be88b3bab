"""Captured passes replayed as CUDA graphs."""
