"""Search for the best draft of a model: which sub-layers to skip, and the precision of the others."""
