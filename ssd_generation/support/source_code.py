"""Fingerprints of code: of the classes that a model consists of, and of this package."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version
from pathlib import Path

from torch import nn

__all__ = ["code_of", "code_of_package"]


def code_of(model: nn.Module) -> str:
    """Return a fingerprint of the classes that the model consists of, and of the code of their passes.

    Modules from neither torch nor transformers count with their place and their plain attributes.
    """
    kinds = {type(module) for module in model.modules()}
    lines = []
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(("torch.", "transformers.")):
            given = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
            lines.append(f"{name} {sorted(given.items())}")
    for kind in kinds:
        code = getattr(kind.forward, "__code__", None)
        body = "" if code is None else hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()
        lines.append(f"{kind.__module__}.{kind.__qualname__} {body}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


@functools.cache
def code_of_package() -> str:
    """Return a fingerprint of the code of this package; its version where it is not installed as files."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    except OSError:
        return version(__name__.partition(".")[0])
    return digest.hexdigest()
