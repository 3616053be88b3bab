"""Measurements of this library beside its peers."""
