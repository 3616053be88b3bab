"""Whether text is the same in every form of a model's weights: the page docs/quantised.md."""
