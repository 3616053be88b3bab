"""Measurements of one model on this machine, and what drafting has learnt of it."""
