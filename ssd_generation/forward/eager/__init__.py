"""Passes by the model's own code, and what is put in place for them."""
