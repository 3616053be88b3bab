"""Low-bit copies of a model's weights, for drafting."""
