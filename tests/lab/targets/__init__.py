"""Texts of one model in every form of its weights, compared with plain `generate`'s, for docs/quantised.md."""
