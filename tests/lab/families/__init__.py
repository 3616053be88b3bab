"""A tiny model of each family of transformers: is its text plain `generate`'s? For docs/models.md."""
