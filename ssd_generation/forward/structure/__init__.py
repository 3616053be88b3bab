"""What a model consists of: sub-layers, linear layers, adapters, weights, and skip mode, which leaves some out."""
