"""Whether text is plain `generate`'s, for a tiny model of each family of transformers: the page docs/models.md."""
