"""Structure of a model: sub-layers, linear layers, adapters, weights, and skip mode, which leaves some out."""
