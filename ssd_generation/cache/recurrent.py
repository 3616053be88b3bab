"""Recurrent states, from which no token can be removed: they are restored from a checkpoint.

The states of a hybrid model's linear attention, state space or convolution layers include all tokens of a pass, the
rejected ones as well. So a copy of the states at a checkpoint is stored. Where tokens of a pass are rejected, the copy
is restored, keys and values are cropped to the checkpoint as well, and the tokens committed since then go through the
next pass again, before those to be verified: a few more rows, not another pass over the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..support.once import looked_at_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "MOST_OWED",
    "REACH",
    "Checkpoint",
    "LayerStates",
    "NoRoomForStates",
    "PassState",
    "PassStates",
    "copied_states",
    "crop_attention",
    "fork_states",
    "give_states",
    "has_all_states",
    "has_begun",
    "has_no_keys",
    "has_states",
    "has_states_alone",
    "is_known",
    "keeps_states",
    "knows_its_length",
    "layers_of_states",
    "layers_without_keys",
    "named_states",
    "replace_states",
    "slots_of",
    "states_in",
    "usual_layers",
]

MOST_OWED = 48
"""Limit on the committed tokens that each pass repeats: a round without a draft then ends the repetition. (Passes over
several tokens compute states in chunks of 64 and more: up to that size, more tokens hardly cost more.)"""

REACH = 256
"""Number of slots retained before a sliding window, so that it can be cropped to the checkpoint."""

_KNOWN = tuple(
    getattr(cache_utils, name)
    for name in (
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)

LayerStates = dict[str, torch.Tensor]
"""States of a layer of a cache, `(rows, …)`, by kind and number, such as `conv.0` and `recurrent.0`."""

_KINDS = ("conv", "recurrent")

_WINDOW = ("keys", "values", "cumulative_length")
"""Attributes of a layer with a sliding window alongside its states: these cannot be cropped, and are restored too."""


def keeps_states(layer: Any) -> bool:
    """Tell whether a layer of a cache holds recurrent or convolution states, alone or alongside keys and values."""
    return hasattr(layer, "recurrent_states")


def is_known(layer: Any) -> bool:
    """Tell whether the states of a layer can be copied and restored here."""
    known = type(layer) in _KNOWN or getattr(type(layer), "has_known_states", False)
    return known and isinstance(layer.recurrent_states, dict) and isinstance(layer.conv_states, dict)


def has_no_keys(layer: Any) -> bool:
    """Tell whether a layer is for a layer of the model that stores nothing, or holds states that can be copied here.

    These are states of a text that has begun, without keys and values next to them.
    """
    if type(layer) is getattr(cache_utils, "DummyLayer", None):
        return True
    return (
        is_known(layer)
        and not isinstance(layer, CacheLayerMixin)
        and all(map(layer.has_previous_state.get, range(layer.number_of_states)))
    )


class PassState(NamedTuple):
    """Recurrent state that a pass continues from, `(rows, …)`.

    Attributes:
        source: the state before the pass.
        working: the state that the pass leaves; it may be the source.
        saved: the state after some tokens of each text; `None`: nowhere.
    """

    source: torch.Tensor
    working: torch.Tensor
    saved: torch.Tensor | None = None


class PassStates:
    """The states of a pass, of which each token of a text changes what the one before it left.

    Args:
        layers: states of each layer, those of convolutions first.
        saved_after: number of tokens of each text after which states are saved.
    """

    def __init__(self, layers: list[list[PassState]], saved_after: int = -1) -> None:
        self.layers, self.saved_after = layers, saved_after

    @classmethod
    def of(cls, layers: Sequence[Any]) -> PassStates:
        """Return the states of a cache's layers, changed in place."""
        return cls([[PassState(state, state) for state in states_in(layer)] for layer in layers])

    def go_on(self) -> PassStates:
        """Return the states of the next pass, which saves none."""
        return PassStates([[PassState(state.working, state.working) for state in layer] for layer in self.layers])


def states_in(layer: Any) -> list[torch.Tensor]:
    """Return the states of a layer of a cache: those of convolutions, then the recurrent ones."""
    if not keeps_states(layer) or not is_known(layer):
        return []
    held = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in held if state is not None]


def named_states(layer: Any) -> LayerStates:
    """Return the states of a layer of a cache by name, in the order of `states_in`; of other layers, none."""
    if not keeps_states(layer) or not is_known(layer):
        return {}
    held = [(kind, getattr(layer, f"{kind}_states")) for kind in _KINDS]
    return {f"{kind}.{index}": state for kind, by in held for index, state in by.items() if state is not None}


def copied_states(cache: Cache) -> list[LayerStates]:
    """Return copies of the states of a cache by layer; layers without have none."""
    return [{name: state.clone() for name, state in named_states(layer).items()} for layer in cache.layers]


def give_states(layer: Any, states: LayerStates) -> None:
    """Put copies of states into a layer, in place of its own, as a pass over their text would have left it.

    Args:
        layer: layer of states (`keeps_states`).
        states: states of such a layer.
    """
    for name, state in states.items():
        kind, _, index = name.partition(".")
        getattr(layer, f"update_{kind}_state")(state, state_idx=int(index))
        layer.has_previous_state[int(index)] = True


def has_begun(cache: Cache) -> bool:
    """Tell whether a cache holds anything of a text."""
    with_states = (layer for layer in cache.layers if keeps_states(layer) and is_known(layer))
    return slots_of(cache) > 0 or any(any(layer.has_previous_state.values()) for layer in with_states)


def has_all_states(cache: Cache) -> bool:
    """Tell whether the layers of a cache hold states, all of them those of a text that has begun."""
    states = [layer for layer in cache.layers if keeps_states(layer)]
    return bool(states) and all(is_known(layer) and all(layer.has_previous_state.values()) for layer in states)


def replace_states(layer: Any, states: Sequence[torch.Tensor]) -> None:
    """Make a layer of a cache hold other states, in the order of `states_in`."""
    others = iter(states)
    for held in (layer.conv_states, layer.recurrent_states) if states else ():
        for index, state in held.items():
            if state is not None:
                held[index] = next(others)


def has_states_alone(model: PreTrainedModel) -> bool:
    """Tell whether the cache of a model holds states, and no keys."""
    layers = usual_layers(model)
    return any(map(keeps_states, layers)) and not any(isinstance(layer, CacheLayerMixin) for layer in layers)


def usual_layers(model: PreTrainedModel) -> list[Any]:
    """Return the empty layers of the cache that transformers makes for a model, or would make."""
    layers: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return layers


@looked_at_once
def has_states(model: PreTrainedModel) -> bool:
    """Tell whether a model holds recurrent or convolution states in its cache."""
    return any(map(keeps_states, usual_layers(model)))


def knows_its_length(cache: Cache) -> bool:
    """Tell whether a cache knows how many tokens it holds; one of states alone does not."""
    return not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def slots_of(cache: Cache | None, otherwise: int = 0) -> int:
    """Return the number of tokens that a cache holds.

    Args:
        cache: the cache; `None` holds no tokens.
        otherwise: number assumed for a cache of states alone, which does not know its length.
    """
    if cache is None:
        return 0
    return int(cache.get_seq_length()) if knows_its_length(cache) else otherwise


def layers_without_keys(model: PreTrainedModel) -> frozenset[int]:
    """Return the indices of the layers of which the cache holds states alone, or nothing."""
    return frozenset(index for index, layer in enumerate(usual_layers(model)) if not isinstance(layer, CacheLayerMixin))


def layers_of_states(model: PreTrainedModel) -> frozenset[int]:
    """Return the indices of the layers of which the cache holds states alone that can be copied and restored here."""
    layers = usual_layers(model)
    return frozenset(index for index in layers_without_keys(model) if is_known(layers[index]))


class NoRoomForStates(MemoryError):
    """Error for lack of memory for a copy of the states, so that no token can be rolled back; nothing has changed."""


def _copy(state: torch.Tensor) -> torch.Tensor:
    try:
        return state.clone()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise NoRoomForStates(
            f"no memory is left for a checkpoint of recurrent states of {state.nbytes:,} bytes"
        ) from error


def fork_states(layer: Any) -> Any:
    """Return a layer of the same kind with copies of the states; both layers share keys and values.

    Args:
        layer: layer that holds states (`keeps_states`).
    """
    fork = copy.copy(layer)
    for name, kept in vars(layer).items():
        if isinstance(kept, dict):
            vars(fork)[name] = {
                index: _copy(state) if isinstance(state, torch.Tensor) else state for index, state in kept.items()
            }
    return fork


def crop_attention(cache: Cache, slots: int) -> None:
    """Crop the keys and values of a cache to `slots` slots, where they are longer; states stay as they are.

    Args:
        cache: cache of a model with recurrent states.
        slots: the new length.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if not keeps_states(layer):
            if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > slots:  # others hold nothing
                layer.crop(slots - layer.get_seq_length())
        elif _has_window(layer):
            continue
        elif getattr(type(layer), "has_known_states", False):
            if layer.get_seq_length() > slots:
                layer.crop(slots - layer.get_seq_length())
        elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.keys.numel():
            layer.keys, layer.values = layer.keys[..., :slots, :], layer.values[..., :slots, :]


class Checkpoint:
    """States of a cache at a checkpoint, and the tokens that have gone through a pass since.

    Args:
        length: number of slots of a cache, all of which its states cover, in each of its rows.

    Attributes:
        length: number of slots up to the checkpoint.
        has_no_room: whether there was no memory for a copy of the states; then `may_fail` of `begin` must be false.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.has_no_room = False
        self._since: torch.Tensor | None = None  # tokens of the last pass, all of them after the checkpoint
        self._stands = 0  # number of these that the states cover: all or none
        self._saved: list[_Saved] | None = None
        self._spare: list[list[torch.Tensor]] | None = None  # memory for the states that a pass saves
        self._unsaved: list[_Saved] | None = None  # the same, while the checkpoint is not saved
        self._drafted: list[list[torch.Tensor]] | None = None  # and for those of drafts

    @classmethod
    def of(cls, cache: Cache, length: int) -> Checkpoint | None:
        """Create the checkpoint of a cache that holds states; return `None` for any other."""
        return cls(length) if any(map(keeps_states, cache.layers)) else None

    def begin(self, cache: Cache, length: int, may_fail: bool) -> torch.Tensor | None:
        """Prepare a cache for a pass.

        Args:
            cache: the cache.
            length: number of committed slots, no fewer than at the last call.
            may_fail: whether tokens of the pass may be rejected.

        Returns:
            Tokens `(B, n)` that were committed after the checkpoint and have to be in the pass again, before its own;
            `None` where there are none.
        """
        return self.save(cache, length) if may_fail else self.rewind(cache, length)

    def save(self, cache: Cache, length: int) -> torch.Tensor | None:
        """Copy the states, so that tokens of the next pass can be rejected.

        Args:
            cache: the cache.
            length: as in `begin`.

        Returns:
            As in `begin`.

        Raises:
            NoRoomForStates: there is no memory for the copy.
        """
        again = self.rewind(cache, length)
        if self._saved is None:
            self._saved = [_Saved(layer) for layer in cache.layers]
        return again

    def rewind(self, cache: Cache, length: int) -> torch.Tensor | None:
        """Bring the states to the committed tokens, all of them or those up to the checkpoint.

        Args:
            cache: the cache.
            length: number of committed slots, no fewer than at the last call.

        Returns:
            As in `begin`.
        """
        if not self.owed(length):
            # All of the last pass was accepted: the states are those after it.
            if length > self.length:
                self.length, self._since, self._stands, self._saved = length, None, 0, None
            return None
        assert self._since is not None
        if self._stands:
            self.restore(cache)
        return self._since[:, : length - self.length]

    def owed(self, length: int) -> int:
        """Return the number of tokens that the next pass has to repeat.

        Args:
            length: number of committed slots.
        """
        return 0 if length == self.length + self._stands else length - self.length

    def passed(self, tokens: torch.Tensor) -> None:
        """Note that a pass has gone over tokens `(B, n)` that begin at the checkpoint."""
        self._since, self._stands = tokens, tokens.shape[1]

    # ------------------------------------------------------------------------------------------------------------------
    # passes that save states on their way

    def states_of_pass(self, cache: Cache, length: int, may_fail: bool) -> tuple[PassStates, torch.Tensor | None]:
        """Return the states of a pass that saves those of the committed tokens itself, and the tokens that it repeats.

        Call `saved` after the pass. Until then the checkpoint is as it was, and can be returned to.

        Args:
            cache: the cache; keys and values are cropped to the checkpoint where tokens are repeated.
            length: number of committed slots, no fewer than at the last call.
            may_fail: whether tokens of the pass may be rejected.

        Raises:
            NoRoomForStates: there is no memory for the copies.
        """
        sources, again = self._sources(cache, length)
        working: Sequence[Sequence[Any]] = [states_in(layer) for layer in cache.layers]
        saved: Sequence[Sequence[Any]] = [[None] * len(states) for states in working]
        if may_fail:
            self.reserve(cache)
            assert self._spare is not None
            # Where the cache has the states to return to, they stay as they are: the pass leaves its own elsewhere.
            working, saved = (self._spare, saved) if again is None else (working, self._spare)
        layers = [list(map(PassState, *states)) for states in zip(sources, working, saved, strict=True)]
        return PassStates(layers, again.shape[1] if may_fail and again is not None else -1), again

    def reserve(self, cache: Cache) -> None:
        """Make room for the states that a pass saves.

        Raises:
            NoRoomForStates: there is no memory for the copies.
        """
        if self._spare is None:
            self._spare = [list(map(_copy, states_in(layer))) for layer in cache.layers]
        if self._saved is None:
            self._unsaved = self._unsaved or [_Saved(layer) for layer in cache.layers]

    def states_of_draft(self, cache: Cache, length: int) -> tuple[PassStates, torch.Tensor | None]:
        """Return the states of a draft's first pass, which leaves those of the cache as they are.

        Args:
            cache, length: as in `states_of_pass`.

        Returns:
            The states, and the tokens that the pass repeats.

        Raises:
            NoRoomForStates: there is no memory for the copies.
        """
        sources, again = self._sources(cache, length)
        if self._drafted is None:
            self._drafted = [list(map(_copy, states)) for states in sources]
        layers = [list(map(PassState, *states)) for states in zip(sources, self._drafted, strict=True)]
        return PassStates(layers), again

    def _sources(self, cache: Cache, length: int) -> tuple[list[list[torch.Tensor]], torch.Tensor | None]:
        """Return the latest states of committed tokens alone, and the tokens committed since; crop keys and values."""
        owed = self.owed(length)
        if not owed or self._since is None:
            return [states_in(layer) for layer in cache.layers], None
        crop_attention(cache, self.length)
        if self._stands and self._saved is not None:
            return [saved.states() for saved in self._saved], self._since[:, :owed]
        return [states_in(layer) for layer in cache.layers], self._since[:, :owed]

    def saved(self, cache: Cache, length: int, tokens: torch.Tensor, may_fail: bool, repeats: bool) -> None:
        """Note that a pass with the states of `states_of_pass` is over.

        Args:
            cache, length, may_fail: as there.
            tokens: tokens `(B, n)` of the pass, without repeated ones.
            repeats: whether it repeated tokens.
        """
        if may_fail:
            at_checkpoint = self._spare
            if not repeats:
                at_checkpoint = [states_in(layer) for layer in cache.layers]
                for layer, states in zip(cache.layers, self._spare or [], strict=True):
                    replace_states(layer, states)
            self._saved, self._unsaved = self._saved or self._unsaved, None
            assert self._saved is not None and at_checkpoint is not None
            self._spare = [saved.exchange(states) for saved, states in zip(self._saved, at_checkpoint, strict=True)]
        else:
            self._saved, self._unsaved = None, self._saved or self._unsaved
        self.length, self._since, self._stands = length, tokens, tokens.shape[1]

    def latest(self, cache: Cache, length: int) -> tuple[int, list[LayerStates]]:
        """Return the latest states of committed tokens alone: the number of these, and the states by layer.

        Args:
            cache: the cache.
            length: number of committed slots.
        """
        found = [named_states(layer) for layer in cache.layers]
        if not self.owed(length):
            return length, found
        if self._stands and self._saved is not None:
            return self.length, [dict(zip(x, y.states(), strict=True)) for x, y in zip(found, self._saved, strict=True)]
        return self.length, found

    def end(self, cache: Cache, length: int) -> None:
        """Remove all uncommitted tokens from a cache, after an exception.

        Committed ones may be missing then: to continue from the checkpoint takes a pass, which is not run here.

        Args:
            cache: the cache.
            length: number of committed slots.
        """
        if not self.owed(length) or self._saved is None:
            crop_attention(cache, length)
        else:
            self.restore(cache)

    def restore(self, cache: Cache) -> None:
        """Remove everything after the checkpoint from a cache."""
        self._stands = 0
        crop_attention(cache, self.length)
        layers: list[Any] = cache.layers
        for layer, saved in zip(layers, self._saved or [], strict=False):
            saved.restore(layer)


def _has_window(layer: Any) -> bool:
    """Tell whether a layer holds states and, alongside them, the keys and values of a sliding window alone."""
    return keeps_states(layer) and isinstance(layer, DynamicSlidingWindowLayer)


class _Saved:
    """Copy of what cannot be cropped in a layer, in its current state."""

    def __init__(self, layer: Any) -> None:
        names = ("conv_states", "recurrent_states") if keeps_states(layer) else ()
        self._states = {
            name: {index: _copy(state) for index, state in getattr(layer, name).items() if state is not None}
            for name in names
        }
        # Appending to keys and values makes new tensors: the stored ones stay as they are.
        self._window = {name: getattr(layer, name) for name in _WINDOW} if _has_window(layer) else {}

    def states(self) -> list[torch.Tensor]:
        """Return the states in the order of `states_in`."""
        return [state for states in self._states.values() for state in states.values()]

    def exchange(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Hold other states, and return those held before, in the order of `states_in`."""
        before, others = self.states(), iter(states)
        for held in self._states.values():
            for index in held:
                held[index] = next(others)
        return before

    def restore(self, layer: Any) -> None:
        for name, states in self._states.items():
            for index, state in states.items():
                getattr(layer, name)[index].copy_(state)
        for name, value in self._window.items():
            setattr(layer, name, value)
