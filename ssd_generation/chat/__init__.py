"""Conversations of several turns over one KV cache."""
