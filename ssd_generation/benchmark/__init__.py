"""Measurements of this library compared with its peers."""
