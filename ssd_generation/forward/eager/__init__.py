"""Passes by the model's own code, and the replacements put in place for them."""
