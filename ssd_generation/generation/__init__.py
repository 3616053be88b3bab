"""`generate(self_speculative=…)`: the mixin that adds it to a model, and the functions that enable and disable it."""

from .enable import (
    disable_self_speculative,
    enable_self_speculative,
    is_self_speculative,
    require_drafts,
    why_no_drafts,
)
from .mixin import SelfSpeculativeMixin, _rebuild
from .prefixes import PrefixCacheSize, bytes_of
from .request import SelfSpeculativeRequest

__all__ = [
    "PrefixCacheSize",
    "SelfSpeculativeMixin",
    "SelfSpeculativeRequest",
    "_rebuild",  # named by pickles of enabled models
    "bytes_of",
    "disable_self_speculative",
    "enable_self_speculative",
    "is_self_speculative",
    "require_drafts",
    "why_no_drafts",
]
