"""Code of `custom_generate/`, which makes transformers draft with a model wherever `generate` is called."""

from __future__ import annotations

import sys
from pprint import pformat
from typing import Literal

from packaging.version import Version

from ..config import SelfSpeculativeConfig

__all__ = ["generate_code", "is_ours", "requirements", "served_code"]

_PACKAGE = __name__.partition(".")[0]

# Imports a public name only: a folder outlives the version that wrote it.
_CODE = '''"""Self-speculative decoding: the model drafts for itself and verifies the draft, so the text stays its own.

Written by `ssd export`. Needs the package: pip install ssd_generation
"""

from ssd_generation import generate_drafting

# A config, as `SelfSpeculativeConfig.to_dict()` has it; or "auto": the fastest way to draft on the machine.
DEFAULT = {default}


def generate(*inputs, model, **arguments):
    """Generate as the model's own `generate`, drafting; `self_speculative=False` decodes plainly for a call."""
    return generate_drafting(model, DEFAULT, inputs, arguments)
'''

_SERVED = '''"""Drafts and logs each request. Written by `ssd serve`, for as long as it runs."""

from ssd_generation.serving.requests import serve_request

DEFAULT = {default}


def generate(*inputs, model, **arguments):
    return serve_request(model, DEFAULT, inputs, arguments)
'''


def generate_code(default: SelfSpeculativeConfig | Literal["auto"]) -> str:
    """Return `custom_generate/generate.py` for an exported folder."""
    return _CODE.format(default=_literal(default))


def served_code(default: SelfSpeculativeConfig | Literal["auto"]) -> str:
    """Return `custom_generate/generate.py` for a model while it is served."""
    return _SERVED.format(default=_literal(default))


def requirements() -> str:
    """Return the content of `custom_generate/requirements.txt`, which transformers checks."""
    here = Version(sys.modules[_PACKAGE].__version__)
    # transformers reads digits and dots, and considers a development version older than its release.
    return f"{_PACKAGE}\n" if here.is_prerelease else f"{_PACKAGE}>={here.base_version}\n"


def is_ours(code: str) -> bool:
    """Tell whether a `custom_generate/generate.py` was written by this library, so that it may be replaced."""
    return "from ssd_generation" in code


def _literal(default: SelfSpeculativeConfig | Literal["auto"]) -> str:
    if not isinstance(default, SelfSpeculativeConfig):
        return f'"{default}"'
    return pformat(default.to_dict(), width=120, sort_dicts=False)
