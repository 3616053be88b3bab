"""Choice of the next token: the most probable one, or the one that plain sampling would draw.

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

from ..native.codegen.compiler import why_not
from ..native.ops.exponentials import draw_exponentials
from ..native.ops.kernels import NAMES
from ..native.ops.race import race
from ..support.forks import ForkSafeRLock
from ..support.tensors import argmax
from .truncation import APART, Drawn, Truncation

__all__ = ["IMPOSSIBLE", "Choice", "SampledChoice", "winners"]

IMPOSSIBLE = -1
"""Placeholder for a token where the scores allow none: all are −∞, or one is not a number."""

_MOST_BYTES = 2**28
"""Limit in bytes on the noise stored for the lagging rows of a batch; it bounds the lead of the others."""

_LEAST_LEAD = 8

_LARGE = 4096
"""Least size of a vocabulary for which a kernel races: for fewer scores its call takes longer."""

_HISTORY = 64
"""Number of committed steps whose noise can be drawn again."""


class Choice:
    """Rule that picks tokens from scores, shared by draft and target. This one takes the most probable token.

    Attributes:
        draws: whether tokens are sampled.
    """

    draws = False

    def choose(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Return the tokens that plain decoding would take.

        Args:
            scores (`torch.FloatTensor` of shape `(B, n, V)`): scores after all logits processors.
            steps: step of each row's first place, 0 for the first new token.

        Returns:
            `torch.LongTensor` of shape `(B, n)`; under sampling `IMPOSSIBLE` where nothing can be drawn.
        """
        return argmax(scores)

    def choose_for_draft(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Choose tokens that are drafted, by the rule of `choose`."""
        return self.choose(scores, steps)

    def choose_again(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Return the tokens that other scores would have led to at committed steps of a single text.

        Args:
            scores (`torch.FloatTensor` of shape `(n, V)`): scores after all logits processors.
            steps: step of each place, among the last 64 committed.
        """
        return argmax(scores)

    def fail(self, scores: torch.Tensor) -> None:
        """Raise plain decoding's error for scores `(B, V)` from which nothing can be drawn."""

    def commit(self, steps: int) -> None:
        """Note that `steps` steps are committed; data of earlier ones is no longer needed."""

    def end(self, steps: int) -> None:
        """End the call after `steps` committed steps."""

    @property
    def longest_lead(self) -> int:
        """Largest number of steps by which a row of a batch may lead the slowest one."""
        return sys.maxsize


class SampledChoice(Choice):
    """Choice of the token that `torch.multinomial` would draw, with the noise that it would draw at that step.

    The noise comes from a generator private to the call, which starts from the state of torch's generator for the
    device; `end` leaves torch's in the state in which plain decoding would have left it. So other threads cannot change
    the text. Concurrent calls that start from the same state, without seeding in between, get different noise.

    Args:
        batch: number of rows, B.
        device: device of the scores.

    Attributes:
        ring (`torch.FloatTensor` of shape `(steps, V)`): buffer of the noise (`draw_into`); `None` for any memory.
    """

    draws = True

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self._vocabulary = 0
        self._dtype = torch.float32  # of the scores from which committed tokens are chosen
        self._noise: dict[int, torch.Tensor] = {}  # by step: (B, V)
        self._unused: list[torch.Tensor] = []
        self._race: torch.Tensor | None = None  # its memory serves the next step: new pages cost as much as the race
        self._states: dict[int, torch.Tensor] = {}  # by step: state of the generator before its noise is drawn
        self.ring: torch.Tensor | None = None
        self._drawn = 0  # number of steps whose noise has been drawn
        self._first = 0  # first step whose noise is still stored
        self._generator = torch.Generator(device)
        with _lock:
            default = _default_generator(device)
            start = default.get_state()
            self._start = _key(start)
            if any(self._start == call._start for call in _running):
                # Another call already draws from this state, and no seed has been set since.
                seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
                self._generator.manual_seed(int(seed))
                self._start = _key(default.get_state())
            else:
                self._generator.set_state(start)
            _running.append(self)

    # ------------------------------------------------------------------------------------------------------------------

    def choose(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Implement `Choice.choose`."""
        count = scores.shape[1]
        self._dtype = scores.dtype
        self._draw_again_if_other(min(steps), scores.dtype, scores.shape[2])
        self.draw_up_to(max(steps) + count, scores.shape[2])
        race = self._race = torch.softmax(scores, dim=-1, out=self._memory_for(scores))
        if len(set(steps)) == 1:
            for place in range(count):
                race[:, place] /= self._noise[steps[0] + place]
        else:
            for row, first in enumerate(steps):
                for place in range(count):
                    race[row, place] /= self._noise[first + place][row]
        return winners(race)

    def draw(self, truncation: Truncation, scores: torch.Tensor, steps: Sequence[int]) -> Drawn | None:
        """Draw the tokens that `choose` returns for scores after further processors, as far as that is certain.

        Args:
            truncation: settings of these processors.
            scores (`(B, n, V)`, float32 or of 16 bits): scores before them, on the CPU.
            steps: as in `choose`.

        Returns:
            What `Truncation.draw` does, of all B · n places.
        """
        batch, count, vocabulary = scores.shape
        self._dtype = torch.float32
        self._draw_again_if_other(min(steps), self._dtype, vocabulary)
        self.draw_up_to(max(steps) + count, vocabulary)

        if truncation.is_none:
            return self._race_of_all(scores, steps, 1.0 if truncation.temperature is None else truncation.temperature)

        def noise_of(tokens: torch.Tensor) -> torch.Tensor:
            by_row = tokens.view(batch, count, -1)
            found = torch.empty(by_row.shape, dtype=self._dtype, device=scores.device)
            are_level = len(set(steps)) == 1
            for place in range(count):
                if are_level:
                    found[:, place] = self._noise[steps[0] + place].gather(1, by_row[:, place])
                    continue
                for row, first in enumerate(steps):
                    found[row, place] = self._noise[first + place][row, by_row[row, place]]
            return found.flatten(0, 1)

        return truncation.draw(scores.reshape(batch * count, vocabulary), noise_of)

    def _race_of_all(self, scores: torch.Tensor, steps: Sequence[int], temperature: float) -> Drawn | None:
        """Draw tokens from all scores by a kernel; arguments as in `draw`."""
        batch, count, vocabulary = scores.shape
        if vocabulary < _LARGE or scores.dtype not in NAMES or why_not() is not None:
            return None
        flat = scores.reshape(batch * count, vocabulary).contiguous()
        noise = [self._noise[first + place][row] for row, first in enumerate(steps) for place in range(count)]
        keys, tokens = race(flat, noise, temperature)
        # Keys are rounded in proportion to their size.
        best, second = keys.double().unbind(dim=1)
        are_sure = best.isfinite() & (best - second > APART + best.abs() * 2.0**-22)
        return Drawn(tokens, torch.full_like(best, torch.nan), are_sure)

    def choose_at(self, scores: torch.Tensor, row: int, step: int) -> torch.Tensor:
        """Return the token `()` that `choose` returns for scores `(V,)` of one place of a row."""
        return winners((scores.softmax(dim=-1) / self._noise[step][row])[None])[0]

    def choose_for_draft(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Implement `Choice.choose_for_draft` with the noise of the target, whose scores may be of another type."""
        return self.choose(scores.to(self._dtype), steps)

    def choose_again(self, scores: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Implement `Choice.choose_again`."""
        race = scores.softmax(dim=-1)
        generator = torch.Generator(self._device)
        noise = race.new_empty((1, race.shape[1]))
        for step in sorted(set(steps)):
            generator.set_state(self._states[step])
            draw_exponentials(noise, generator)
            for place, its_step in enumerate(steps):
                if its_step == step:
                    race[place] /= noise[0]
        return winners(race)

    def fail(self, scores: torch.Tensor) -> None:
        """Implement `Choice.fail`."""
        torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=torch.Generator(self._device))
        raise RuntimeError("No token can be drawn: a probability is not a number.")

    def commit(self, steps: int) -> None:
        """Implement `Choice.commit`."""
        while self._first < steps:
            noise = self._noise.pop(self._first, None)
            if noise is not None and self.ring is None:
                self._unused.append(noise)
            self._states.pop(self._first - _HISTORY, None)
            self._first += 1

    def end(self, steps: int) -> None:
        """Implement `Choice.end`."""
        with _lock:
            _running.remove(self)
            default = _default_generator(self._device)
            # While other calls run, only if torch's generator has not moved meanwhile.
            if not _running or _key(default.get_state()) == self._start:
                default.set_state(self._states[steps] if steps in self._states else self._generator.get_state())
        self._noise.clear()
        self._unused.clear()
        self.ring = self._race = None

    @property
    def longest_lead(self) -> int:
        """Largest number of steps by which a row may lead, such that the noise of these steps fits into 256 MiB."""
        if self._batch == 1 or not self._vocabulary:
            return sys.maxsize
        return max(_LEAST_LEAD, _MOST_BYTES // (4 * self._batch * self._vocabulary))

    def draw_into(self, ring: torch.Tensor) -> bool:
        """Store the noise of a single text in the rows of a buffer, that of step t in row t modulo the buffer's length.

        Args:
            ring (`torch.FloatTensor` of shape `(steps, V)`): the buffer.

        Returns:
            Whether there is room for the noise that is stored now.
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
        """Draw the noise of all steps before `step` that has not been drawn yet.

        Returns:
            Whether all stored noise is in the buffer of `draw_into`.
        """
        self._vocabulary = vocabulary
        if self.ring is not None and step - self._first > len(self.ring):
            # The buffer would have to hold two of these steps in one row.
            self._noise = {at: noise.clone() for at, noise in self._noise.items()}
            self.ring = None
        while self._drawn < step:
            self._states[self._drawn] = self._generator.get_state()
            self._noise[self._drawn] = draw_exponentials(self._empty(vocabulary), self._generator)
            self._drawn += 1
        return self.ring is not None

    def _draw_again_if_other(self, step: int, dtype: torch.dtype, vocabulary: int) -> None:
        """Discard noise that was drawn for scores of another type or vocabulary, from `step` on.

        `torch.multinomial` draws numbers of the type of its probabilities, and those of float64 take more random bits.
        """
        noise = self._noise.get(step)
        like = self.ring if noise is None else noise
        if like is None or (like.dtype is dtype and like.shape[-1] == vocabulary):
            return
        self.ring = None
        self._unused.clear()
        if noise is not None:
            self._generator.set_state(self._states[step])
            for later in range(step, self._drawn):
                del self._noise[later], self._states[later]
            self._drawn = step

    def _memory_for(self, scores: torch.Tensor) -> torch.Tensor:
        race = self._race
        if race is not None and (race.shape, race.dtype) == (scores.shape, scores.dtype):
            return race
        return torch.empty_like(scores)

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
    """Return the winners `(…,)` of a race `(…, V)`; `IMPOSSIBLE` where an entry is not a number."""
    found = argmax(race)
    best = race.gather(-1, found[..., None]).squeeze(-1)
    return found.masked_fill_(best.isnan(), IMPOSSIBLE)


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of torch that `torch.multinomial` draws from on a device."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]  # type: ignore[no-any-return]


def _key(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()
