"""Which token follows: the most probable one, or the one that plain sampling would draw.

`torch.multinomial(p, 1)` is an exponential race: it draws e_i ~ Exp(1) for every entry and returns argmax p_i / e_i. So
the randomness of a sampled text is one tensor of exponentials for each step, drawn in the order of the steps. Here
draft and target race with the *same* tensor, and a drafted token is accepted while it is the one that the target draws
(drafter-invariant speculative decoding: Daliri, Musco and Suresh, arXiv 2408.07978). The text is then that of plain
`generate` for the same seed, whatever was drafted. Greedy decoding is the same rule without noise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ..support.forks import ForkSafeRLock
from ..support.tensors import argmax

__all__ = ["IMPOSSIBLE", "Choice", "SampledChoice", "winners"]

IMPOSSIBLE = -1
"""Stands for a token where the scores allow none: all are −∞, or one is not a number."""

_MOST_BYTES = 2**28
"""Of noise that is kept for rows of a batch that lag: so far may others run ahead of them."""

_LEAST_LEAD = 8

_HISTORY = 64
"""Committed steps whose noise can be drawn again."""


class Choice:
    """Picks tokens by their scores; draft and target go by the same one. This one takes the most probable token.

    Attributes:
        draws: whether noise decides.
    """

    draws = False

    def choose(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """The tokens that plain decoding would take.

        Args:
            scores (`torch.FloatTensor` of shape `(B, n, V)`): after all logits processors.
            steps: per row, the step of its first place: 0 for the first new token.

        Returns:
            `torch.LongTensor` of shape `(B, n)`; under sampling `IMPOSSIBLE` where nothing can be drawn.
        """
        return argmax(scores)

    def choose_for_draft(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Choose tokens that are drafted, by the rule of `choose`."""
        return self.choose(scores, steps)

    def choose_again(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """The tokens that other scores would have led to at committed steps of a single text.

        Args:
            scores (`torch.FloatTensor` of shape `(n, V)`): after all logits processors.
            steps: of each place; of the last 64 that were committed.
        """
        return argmax(scores)

    def fail(self, scores: torch.Tensor) -> None:
        """Raise what plain decoding raises where nothing can be drawn from scores `(B, V)`."""

    def commit(self, steps: int) -> None:
        """So many steps have been committed: what belongs to earlier ones is not needed any more."""

    def end(self, steps: int) -> None:
        """The call is over, after so many committed steps."""

    @property
    def longest_lead(self) -> int:
        """Steps that a row of a batch may be ahead of the slowest one."""
        return sys.maxsize


class SampledChoice(Choice):
    """The token that `torch.multinomial` would draw, with the noise that it would draw at that step.

    The noise comes from a generator of the call's own, which begins where torch's stands for the device; `end` leaves
    torch's where plain decoding would have left it. So nothing that goes on in other threads changes the text. Calls
    that run side by side and began at the same state, since nobody seeded between them, get noise of their own.

    Args:
        batch: rows, B.
        device: of the scores.

    Attributes:
        ring (`torch.FloatTensor` of shape `(steps, V)`): where the noise is kept (`draw_into`); `None`: anywhere.
    """

    draws = True

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self._vocabulary = 0
        self._dtype = torch.float32  # of the scores that committed tokens were chosen by
        self._noise: dict[int, torch.Tensor] = {}  # by step: (B, V)
        self._unused: list[torch.Tensor] = []
        self._states: dict[int, torch.Tensor] = {}  # by step: the generator before its noise is drawn
        self.ring: torch.Tensor | None = None
        self._drawn = 0  # steps
        self._first = 0  # step whose noise is still kept
        self._generator = torch.Generator(device)
        with _lock:
            default = _default_generator(device)
            start = default.get_state()
            self._start = _key(start)
            if any(self._start == call._start for call in _running):
                # Somebody draws from there already, and nobody has seeded since.
                seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
                self._generator.manual_seed(int(seed))
                self._start = _key(default.get_state())
            else:
                self._generator.set_state(start)
            _running.append(self)

    # ------------------------------------------------------------------------------------------------------------------

    def choose(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """See `Choice.choose`."""
        count = scores.shape[1]
        self._dtype = scores.dtype
        self._draw_again_if_other(min(steps), scores)
        self.draw_up_to(max(steps) + count, scores.shape[2])
        race = scores.softmax(dim=-1)
        if len(set(steps)) == 1:
            for place in range(count):
                race[:, place] /= self._noise[steps[0] + place]
        else:
            for row, first in enumerate(steps):
                for place in range(count):
                    race[row, place] /= self._noise[first + place][row]
        return winners(race)

    def choose_for_draft(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """See `Choice.choose_for_draft`: with the noise that the target's scores, of whichever type, will be given."""
        return self.choose(scores.to(self._dtype), steps)

    def choose_again(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """See `Choice.choose_again`."""
        race = scores.softmax(dim=-1)
        generator = torch.Generator(self._device)
        noise = race.new_empty((1, race.shape[1]))
        for step in sorted(set(steps)):
            generator.set_state(self._states[step])
            noise.exponential_(generator=generator)
            for place, its_step in enumerate(steps):
                if its_step == step:
                    race[place] /= noise[0]
        return winners(race)

    def fail(self, scores: torch.Tensor) -> None:
        """See `Choice.fail`."""
        torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=torch.Generator(self._device))
        raise RuntimeError("No token can be drawn: a probability is not a number.")

    def commit(self, steps: int) -> None:
        """See `Choice.commit`."""
        while self._first < steps:
            noise = self._noise.pop(self._first, None)
            if noise is not None and self.ring is None:
                self._unused.append(noise)
            self._states.pop(self._first - _HISTORY, None)
            self._first += 1

    def end(self, steps: int) -> None:
        """See `Choice.end`."""
        with _lock:
            _running.remove(self)
            default = _default_generator(self._device)
            # Beside others, only if nobody has moved it meanwhile.
            if not _running or _key(default.get_state()) == self._start:
                default.set_state(self._states[steps] if steps in self._states else self._generator.get_state())
        self._noise.clear()
        self._unused.clear()
        self.ring = None

    @property
    def longest_lead(self) -> int:
        """Steps that a row may be ahead of the slowest one, for the noise between them to fit into 256 MiB."""
        if self._batch == 1 or not self._vocabulary:
            return sys.maxsize
        return max(_LEAST_LEAD, _MOST_BYTES // (4 * self._batch * self._vocabulary))

    def draw_into(self, ring: torch.Tensor) -> bool:
        """Keep the noise of a single text in rows of a buffer: that of step t in row t modulo the buffer's length.

        Args:
            ring (`torch.FloatTensor` of shape `(steps, V)`).

        Returns:
            Whether there is room for the noise that is kept.
        """
        if len(self._noise) > len(ring):
            return False
        for step, noise in self._noise.items():
            row = ring[step % len(ring)][None]
            self._noise[step] = row.copy_(noise)
        self._unused.clear()
        self.ring = ring
        return True

    def draw_up_to(self, step: int, vocabulary: int) -> bool:
        """Draw the noise of all steps before this one, if it has not been.

        Returns:
            Whether all that is kept is where it was asked for (`draw_into`).
        """
        self._vocabulary = vocabulary
        if self.ring is not None and step - self._first > len(self.ring):
            # Of these steps the buffer would have to hold two at one place.
            self._noise = {at: noise.clone() for at, noise in self._noise.items()}
            self.ring = None
        while self._drawn < step:
            self._states[self._drawn] = self._generator.get_state()
            self._noise[self._drawn] = self._empty(vocabulary).exponential_(generator=self._generator)
            self._drawn += 1
        return self.ring is not None

    def _draw_again_if_other(self, step: int, scores: torch.Tensor) -> None:
        """Forget noise that was drawn for scores of another type or vocabulary, from this step on.

        `torch.multinomial` draws numbers of the type of its probabilities, and those of float64 take more random bits.
        """
        noise = self._noise.get(step)
        like = self.ring if noise is None else noise
        if like is None or (like.dtype is scores.dtype and like.shape[-1] == scores.shape[-1]):
            return
        self.ring = None
        self._unused.clear()
        if noise is not None:
            self._generator.set_state(self._states[step])
            for later in range(step, self._drawn):
                del self._noise[later], self._states[later]
            self._drawn = step

    def _empty(self, vocabulary: int) -> torch.Tensor:
        if self.ring is not None:
            return self.ring[self._drawn % len(self.ring)][None]
        while self._unused:
            if (spare := self._unused.pop()).dtype is self._dtype and spare.shape[-1] == vocabulary:
                return spare
        return torch.empty((self._batch, vocabulary), dtype=self._dtype, device=self._device)


_lock = ForkSafeRLock()
_running: list[SampledChoice] = []


def winners(race: torch.Tensor) -> torch.Tensor:
    """The entries `(…,)` that are first in a race `(…, V)`; `IMPOSSIBLE` where one of them is not a number."""
    found = argmax(race)
    best = race.gather(-1, found[..., None]).squeeze(-1)
    return found.masked_fill_(best.isnan(), IMPOSSIBLE)


def _default_generator(device: torch.device) -> torch.Generator:
    """The generator of torch that `torch.multinomial` draws from on a device."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]  # type: ignore[no-any-return]


def _key(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()
