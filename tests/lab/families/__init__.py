"""Texts of a tiny model of each family of transformers, compared with plain `generate`'s, for docs/models.md."""
