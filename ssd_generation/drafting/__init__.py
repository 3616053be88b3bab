"""Drafting: the drafters, prompt lookup, and the draft-length policies."""
