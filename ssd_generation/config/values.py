"""Bounds of a config's fields, and the checks of those that are more than a number or a text.

They limit the largest model that a config can name and the number of entries about it: a config within these bounds
is built, written and read back in less than a second, in less than a mebibyte of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ..support import bounds
from ..support.messages import shown
from ..support.parameters import FrozenMapping

POLICIES = ("cost", "confidence", "fixed", "none")
PRECISIONS = ("int8", "int4")

NUM_LAYERS = bounds.Integer(1, 10_000)
SECONDS = bounds.Number(1e-9, 1e6, "a number of seconds", "Measure it again.")
VERIFIED_TOKENS = bounds.Integer(1, 1_000_000)
NAME = bounds.Text(300)
FREE_TEXT = bounds.Text(10_000)
MOST_MODELS = 1_000
FORMAT = bounds.Integer(1, 1_000_000)
EXPLORATION = bounds.Number(0, 0.5)
BITWISE, NUMERIC = "bitwise", "numeric"
EXACTNESS = bounds.Choice((BITWISE, NUMERIC), none="for bitwise where that is nearly free")
POLICY = bounds.Choice(POLICIES, unknown="Unknown draft-length policy")
PRECISION = bounds.Choice(PRECISIONS, none="for the weights as loaded")
PRECISION_NAME = bounds.Choice(PRECISIONS, unknown="There is no precision")
GROUP_SIZE = bounds.Choice((32, 64, 128, 256))
SWITCH = bounds.Choice((True, False))
SWITCH_OR_NONE = bounds.Choice((True, False, None))
_PROBABILITIES = "be a sequence of probabilities, such as [0.9, 0.85] (() for the default)"
ACCEPTANCE = bounds.Entries(bounds.DRAFT_LENGTH.most, bounds.SHARE, _PROBABILITIES, entry="drafted token")


class _Layers(bounds.Entries):
    """Layer numbers, as a sorted tuple."""

    _refused = (str, bytes, Mapping)

    def check(self, name: str, value: Any) -> tuple[int, ...]:
        layers = sorted(self._layer(name, entry) for entry in self.take(name, value))
        for layer, following in pairwise(layers):
            if layer == following:
                raise ValueError(f"{name} has layer {layer} more than once. Name each layer once, counted from 0.")
        return tuple(layers)

    def _layer(self, name: str, value: Any) -> int:
        layer, last = bounds.index_of(value), self.most - 1
        if layer is None:
            problem = f"{name} has {shown(value)}, which is not an integer."
            raise TypeError(f"{problem} Give the numbers of the layers, counted from 0.")
        if layer < 0:
            problem = f"{name} has the negative layer {shown(layer)}."
            raise ValueError(f"{problem} Layers are counted from 0; give the number itself.")
        if layer > last:
            problem = f"{name} has layer {shown(layer)}, but layers are counted from 0 to {last:,} at the most."
            raise ValueError(problem)
        return layer


class _Precisions(bounds.Items):
    """Precisions by layer, sorted; in JSON the layers are strings."""

    def check(self, name: str, value: Any) -> FrozenMapping[int, str | None]:
        items = self.take(name, value)
        keys = [int(key) if isinstance(key, str) and re.fullmatch(r"-?[0-9]{1,18}", key) else key for key, _ in items]
        layers = LAYERS.check(name, keys)
        precisions = {bounds.index_of(key): precision for key, (_, precision) in zip(keys, items, strict=True)}
        for layer in layers:
            if precisions[layer] is not None:
                self.each.check(f"The precision of {name} {layer}", precisions[layer])
        return FrozenMapping({layer: precisions[layer] for layer in layers})


class _VerifyTimes(bounds.Entries):
    """Pairs (tokens, seconds), ascending in tokens."""

    _refused = (str, bytes, Mapping)

    def check(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        pairs: list[tuple[int, float]] = []
        for given in self.take(name, value):
            pair = bounds.first_entries(given, 3)
            if pair is None or len(pair) != 2:
                kind = TypeError if pair is None else ValueError
                raise kind(f"{name} must {self.form}, but it has {shown(given)}.")
            tokens = VERIFIED_TOKENS.check(f"A token count in {name}", pair[0])
            if pairs and tokens <= pairs[-1][0]:
                problem = f"The token counts in {name} must ascend, each once, but {tokens} comes after {pairs[-1][0]}."
                raise ValueError(f"{problem} Sort the pairs by tokens and keep one per count.")
            pairs.append((tokens, self.each.check(f"The time of verifying {tokens} tokens", pair[1])))
        if not pairs:
            problem = f"{name} must {self.form}, but it is empty."
            raise ValueError(f"{problem} Measure at least one verify pass, or leave out the costs.")
        return tuple(pairs)


class _Versions(bounds.Items):
    """Versions by library name."""

    def check(self, name: str, value: Any) -> FrozenMapping[str, str]:
        versions = dict(self.take(name, value))
        if not all(isinstance(text, str) for item in versions.items() for text in item):
            raise self.refusal(TypeError, name, value)
        for of, version in versions.items():
            self.each.check(f"A name in {name}", of)
            self.each.check(f"The version of {shown(of)}", version)
        return FrozenMapping(versions)


LAYERS = _Layers(NUM_LAYERS.most, NUM_LAYERS, "be a sequence of layer numbers, such as [3, 5] ([] to skip none)")
_EXCEPTIONS = "map layers to precisions, such as {3: 'int8', 5: None} ({} for no exceptions)"
EXCEPTIONS = _Precisions(NUM_LAYERS.most, PRECISION, _EXCEPTIONS)
VERIFY = _VerifyTimes(1_000, SECONDS, "be a sequence of (tokens, seconds) pairs, such as [(1, 0.031), (4, 0.035)]")
VERSIONS = _Versions(50, NAME, "map names to version strings, such as {'torch': '2.13.0'}")
