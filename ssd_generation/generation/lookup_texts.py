"""Texts that prompt lookup searches besides the one being decoded: of the user, and of earlier processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..drafting.ngram_store import NGramStore, StorePart
from ..support.display import path_shown
from ..support.files import replacing
from ..support.messages import clipped
from ..support.model_state import state_of
from ..support.reading import Kind, check_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["add_lookup_texts", "load_lookup_texts", "save_lookup_texts"]

_FILE = Kind("a file of lookup texts", 2**28)
_FORMAT = "1"
_KINDS = ("earlier", "permanent")


def add_lookup_texts(model: PreTrainedModel, texts: Iterable[Sequence[int]]) -> int:
    """Add documents that lookup with `LookupConfig(store=True)` copies from, such as a code base or a manual.

    They stay until `disable_self_speculative`, while the texts of earlier calls are dropped beyond the capacity.

    Args:
        model: an enabled model.
        texts: tokens of each text, as the model's tokenizer encodes them.

    Returns:
        Number of tokens added.

    Raises:
        TypeError: a token is not an integer.
        ValueError: a token is none of the model's, or the texts take more than half of the store (131,072 tokens).
    """
    store, added = _store_of(model), [_checked(model, text) for text in texts]
    for text in added:
        store.add_permanent(text)
    return sum(map(len, added))


def save_lookup_texts(model: PreTrainedModel, path: str | os.PathLike[str]) -> int:
    """Write the texts that lookup searches to a file, for `load_lookup_texts` in another process.

    The file holds the tokens of earlier texts: protect it like the texts themselves. It is written whole or not at all.

    Args:
        model: an enabled model.
        path: the file, by convention `….safetensors`; one that exists is replaced.

    Returns:
        Number of tokens written.

    Raises:
        OSError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    for kind, texts in zip(_KINDS, _store_of(model).texts(), strict=True):
        tensors[f"{kind}.tokens"] = torch.tensor(
            [token for text in texts for token in text], dtype=torch.int64, device="cpu"
        )
        tensors[f"{kind}.lengths"] = torch.tensor([len(text) for text in texts], dtype=torch.int64, device="cpu")
    with replacing(Path(path)) as temporary:
        save_file(tensors, temporary, metadata={"lookup_texts": _FORMAT})
    return int(tensors["earlier.tokens"].numel())


def load_lookup_texts(model: PreTrainedModel, path: str | os.PathLike[str]) -> int:
    """Add the texts of a file, written by `save_lookup_texts`, to those that lookup searches.

    They change no text: drafts copied from them are verified.

    Args:
        model: an enabled model, with the tokenizer of the one that wrote them.
        path: the file.

    Returns:
        Number of tokens read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or holds tokens that are none of the model's.
    """
    shown = path_shown(path)
    check_file(path, _FILE)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            found = (file.metadata() or {}).get("lookup_texts")
            if found != _FORMAT:
                raise ValueError(f"its format is {found!r}, not {_FORMAT!r}")
            texts = {kind: _texts_of(file, kind) for kind in _KINDS}
        checked = {kind: [_checked(model, text) for text in texts[kind]] for kind in _KINDS}
    except (TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"{shown} is no file of lookup texts of this model, or damaged ({clipped(error)}). Write it anew with "
            "save_lookup_texts, from a model with the same tokenizer."
        ) from error
    store = _store_of(model)
    for text in checked["permanent"]:
        store.add_permanent(text)
    permanent = set(map(tuple, checked["permanent"]))
    for text in checked["earlier"]:
        if tuple(text) not in permanent:
            store.add(text)
    return sum(map(len, checked["earlier"]))


def _store_of(model: PreTrainedModel) -> NGramStore:
    store: NGramStore = state_of(model).get(StorePart).store
    return store


def _texts_of(file: Any, kind: str) -> list[list[int]]:
    tokens, lengths = file.get_tensor(f"{kind}.tokens"), file.get_tensor(f"{kind}.lengths")
    if tokens.dtype is not torch.int64 or lengths.dtype is not torch.int64 or bool((lengths <= 0).any()):
        raise ValueError("tokens and lengths are not positive integers")
    return [text.tolist() for text in torch.split(tokens, lengths.tolist())] if len(lengths) else []


def _checked(model: PreTrainedModel, text: Sequence[int]) -> list[int]:
    """Return a text's tokens; raise if one is none of the model's."""
    vocabulary, tokens = int(model.get_input_embeddings().weight.shape[0]), list(text)
    for token in tokens:
        if type(token) is not int:
            raise TypeError(f"Texts are lists of token numbers, but got {type(token).__name__} {token!r:.50}.")
        if not 0 <= token < vocabulary:
            raise ValueError(f"Token {token} is none of the model's, which has 0 to {vocabulary - 1}.")
    return tokens
