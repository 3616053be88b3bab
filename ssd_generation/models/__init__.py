"""Loading of models, and the demo model."""

from .loading import fetch_demo, load_demo, load_model

__all__ = ["fetch_demo", "load_demo", "load_model"]
