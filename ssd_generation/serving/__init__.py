"""Models for programs that call `generate` themselves: folders that draft, and transformers' own server."""

from .folder import Export, export_model
from .source import Source, find_model, stored_default

__all__ = ["Export", "Source", "export_model", "find_model", "stored_default"]
