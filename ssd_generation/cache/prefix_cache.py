"""Keys and values of texts that were read or decoded before, for texts that begin with the same tokens.

They form a tree over tokens: each node holds the keys and values of a run of tokens, which follows those of its
ancestors (a radix tree, as in RadixAttention, SGLang, arXiv 2312.07104). What a call takes is copied into the cache of
the call, and what is new in that is copied back afterwards: so concurrent calls, and calls that are interrupted, leave
the tree consistent. The least recently used runs are dropped first.

From recurrent states no token can be removed. So a text of a model that has them begins after the last token of a run
with a copy of its states: those after some tokens of earlier texts, which their calls chose.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from ..support.forks import ForkSafeRLock
from .recurrent import LayerStates, give_states, has_no_keys

__all__ = ["PrefixCache", "Recurrent", "Start", "States", "StoredRun", "whole_text"]

States = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer, each `(1, heads, tokens, size)`; those of a layer without keys have no heads."""

Recurrent = list[LayerStates]
"""Recurrent states by layer, of one text; a layer without has none."""


@dataclass(frozen=True)
class Start:
    """Stored beginning of a text.

    Attributes:
        count: number of its tokens.
        states: their keys and values.
        recurrent: recurrent states after the last of them; empty where the model has none.
    """

    count: int = 0
    states: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    recurrent: Sequence[LayerStates] = ()

    def fill(self, cache: Cache) -> None:
        """Copy it into an empty cache, of a single text."""
        layers: list[Any] = cache.layers
        for layer, (keys, values) in zip(layers, self.states, strict=False):
            if keys.shape[1]:
                layer.update(keys, values)
        for layer, states in zip(layers, self.recurrent, strict=False):
            if states:
                give_states(layer, states)


class StoredRun(NamedTuple):
    """Run of tokens, as `PrefixCache.runs` returns it.

    Attributes:
        key: everything that its keys and values depend on, except tokens.
        above: number of the run that it follows in the list; `None`: it begins a text.
        tokens: its tokens, `(n,)`.
        states: their keys and values.
        recurrent: recurrent states after its last token; empty where there are none.
    """

    key: Hashable
    above: int | None
    tokens: torch.Tensor
    states: States
    recurrent: Recurrent


@dataclass(eq=False)
class _Run:
    """Run of tokens that follow those of the nodes above, with their keys and values.

    Attributes:
        recurrent: recurrent states after its last token; empty where they are not stored.
    """

    tokens: torch.Tensor
    states: States
    recurrent: Recurrent = field(default_factory=list)
    above: _Run | None = None
    below: dict[int, _Run] = field(default_factory=dict)
    used: int = 0

    def bytes(self) -> int:
        stored = sum(keys.nbytes + values.nbytes for keys, values in self.states)
        return stored + _bytes_of(self.recurrent) + self.tokens.nbytes

    def split(self, at: int) -> int:
        """Leave the first tokens to this node and the others to a new child; return the number of bytes added."""
        before = self.bytes()
        states = _part(self.states, at, len(self.tokens))
        rest = _Run(self.tokens[at:].clone(), states, self.recurrent, self, self.below, self.used)
        for run in rest.below.values():
            run.above = rest
        self.below = {int(rest.tokens[0]): rest}
        self.tokens, self.states, self.recurrent = self.tokens[:at].clone(), _part(self.states, 0, at), []
        return self.bytes() + rest.bytes() - before


class PrefixCache:
    """Store of keys and values, by the tokens that they belong to.

    Args:
        most_bytes: largest number of bytes stored.

    Attributes:
        most_bytes: the given limit.
        bytes: number of bytes stored now.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._roots: dict[Hashable, _Run] = {}
        self._clock = 0
        self._guard = ForkSafeRLock()

    def match(self, key: Hashable, tokens: torch.Tensor) -> int:
        """Return the number of a text's first tokens that are stored.

        Args:
            key: everything that keys and values depend on, except tokens.
            tokens (`torch.LongTensor` of shape `(n,)`): tokens of the text, on the CPU.
        """
        with self._guard:
            return sum(count for _, count in self._path(key, tokens))

    def take(self, key: Hashable, tokens: torch.Tensor, most: int) -> States:
        """Return copies of the keys and values of the first tokens of a text, as far as they are stored.

        Args:
            key, tokens: as in `match`.
            most: largest number of tokens.

        Returns:
            Keys and values by layer; empty where nothing is stored.
        """
        with self._guard:
            self._clock += 1
            parts, left = [], most
            for run, count in self._path(key, tokens):
                run.used = self._clock
                if left > 0:
                    parts.append(_part(run.states, 0, min(count, left), copies=False))
                left -= count
            return [
                (torch.cat([keys for keys, _ in layer], dim=2), torch.cat([values for _, values in layer], dim=2))
                for layer in zip(*parts, strict=True)
            ]

    def recurrent(self, key: Hashable, tokens: torch.Tensor) -> tuple[int, Recurrent]:
        """Return copies of the last recurrent states that are stored of a text, and the number of tokens up to them.

        Args:
            key, tokens: as in `match`.

        Returns:
            The number, 0 where none are stored, and the states.
        """
        with self._guard:
            at, found, states = 0, 0, list[LayerStates]()
            for run, count in self._path(key, tokens):
                at += count
                if count == len(run.tokens) and run.recurrent:
                    found, states = at, run.recurrent
            return found, _copies(states)

    def keep(
        self,
        key: Hashable,
        tokens: torch.Tensor,
        states: States,
        first: int = 0,
        recurrent: Mapping[int, Recurrent] | None = None,
    ) -> None:
        """Store copies of the keys and values of a text, for the tokens that are not stored yet.

        Args:
            key, tokens: as in `match`.
            states: keys and values of these tokens, from the one with number `first` on.
            first: number of tokens before `states`; where these are not stored, nothing is.
            recurrent: recurrent states by the number of tokens that they cover.
        """
        with self._guard:
            self._clock += 1
            at, last = 0, self._roots.setdefault(key, _Run(tokens[:0], []))
            for run, count in self._path(key, tokens):
                if count < len(run.tokens):
                    self.bytes += run.split(count)
                run.used = self._clock
                at, last = at + count, run
            if first <= at < len(tokens):
                part = _part(states, at - first, len(tokens) - first)
                made = _Run(tokens[at:].clone(), part, [], last, {}, self._clock)
                last.below[int(tokens[at])] = made
                self.bytes += made.bytes()
            for count, after in (recurrent or {}).items():
                self._keep_recurrent(key, tokens[:count], after)
            self._drop_oldest()

    def _keep_recurrent(self, key: Hashable, tokens: torch.Tensor, recurrent: Recurrent) -> None:
        """Store copies of the recurrent states after the last of some tokens, where these are stored."""
        path = self._path(key, tokens)
        if sum(count for _, count in path) < len(tokens) or not path:
            return
        run, count = path[-1]
        if count < len(run.tokens):
            self.bytes += run.split(count)
        if not run.recurrent:
            run.recurrent = _copies(recurrent)
            self.bytes += _bytes_of(run.recurrent)

    def runs(self) -> list[StoredRun]:
        """Return all runs.

        A run comes after the one that it follows; otherwise the most recently used come last. Tensors are not copied:
        they are never written to.
        """
        with self._guard:
            found: list[StoredRun] = []
            waiting: list[tuple[Hashable, int | None, _Run]] = [
                (key, None, run) for key, root in self._roots.items() for run in root.below.values()
            ]
            while waiting:
                waiting.sort(key=lambda entry: -entry[2].used)
                key, above, run = waiting.pop()
                waiting += [(key, len(found), below) for below in run.below.values()]
                found.append(StoredRun(key, above, run.tokens, run.states, run.recurrent))
            return found

    def limit(self, most_bytes: int) -> None:
        """Store at most `most_bytes` bytes from now on."""
        with self._guard:
            self.most_bytes = most_bytes
            self._drop_oldest()

    def clear(self) -> None:
        """Drop everything."""
        with self._guard:
            self._roots, self.bytes = {}, 0

    # ------------------------------------------------------------------------------------------------------------------

    def _path(self, key: Hashable, tokens: torch.Tensor) -> list[tuple[_Run, int]]:
        """Return the runs that a text begins with, each with the number of its tokens that are the text's."""
        found, at, run = [], 0, self._roots.get(key)
        while run is not None and at < len(tokens):
            run = run.below.get(int(tokens[at]))
            if run is None:
                break
            ahead = min(len(run.tokens), len(tokens) - at)
            other = (run.tokens[:ahead] != tokens[at : at + ahead]).nonzero()
            count = ahead if len(other) == 0 else int(other[0])
            found.append((run, count))
            at += count
            if count < len(run.tokens):
                break
        return found

    def _drop_oldest(self) -> None:
        while self.bytes > self.most_bytes:
            ends = [run for run in self._runs() if not run.below]
            if not ends:
                return
            oldest = min(ends, key=lambda run: run.used)
            assert oldest.above is not None
            del oldest.above.below[int(oldest.tokens[0])]
            self.bytes -= oldest.bytes()
        self._roots = {key: root for key, root in self._roots.items() if root.below}

    def _runs(self) -> Iterator[_Run]:
        waiting = [run for root in self._roots.values() for run in root.below.values()]
        while waiting:
            run = waiting.pop()
            yield run
            waiting.extend(run.below.values())


def _part(states: States, first: int, end: int, copies: bool = True) -> States:
    """Cut keys and values to tokens `first … end`, in copies unless views will do: these retain the memory of all."""
    parts = [(keys[:, :, first:end], values[:, :, first:end]) for keys, values in states]
    return [(keys.clone(), values.clone()) for keys, values in parts] if copies else parts


def _copies(recurrent: Recurrent) -> Recurrent:
    return [{name: state.clone() for name, state in layer.items()} for layer in recurrent]


def _bytes_of(recurrent: Recurrent) -> int:
    return sum(state.nbytes for layer in recurrent for state in layer.values())


def whole_text(cache: Cache, tokens: int) -> States | None:
    """Return views of a single text's first keys and values in its cache; `None` where a layer has dropped some.

    Args:
        cache: cache with buffers.
        tokens: number of tokens, n.
    """
    found: States = []
    for layer in cache.layers:
        if has_no_keys(layer):
            empty = torch.empty((1, 0, tokens, 0), device="cpu")
            found.append((empty, empty))
            continue
        known: Sequence[Any] = (getattr(layer, "key_buffer", None), getattr(layer, "value_buffer", None))
        if any(part is None for part in known) or layer.start != 0 or layer.end < tokens:
            return None
        if layer.get_seq_length() != layer.end:  # a window that has moved on
            return None
        keys, values = known
        if keys.shape[0] != 1:
            return None
        found.append((keys[:, :, :tokens], values[:, :, :tokens]))
    return found or None
