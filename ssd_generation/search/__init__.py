"""Search for the best draft of a model: which sub-layers to skip, and in which precision to keep the others."""
