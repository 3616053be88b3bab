"""Passes captured from the model's own code as `torch.fx` graphs, with faster kernels in them."""
