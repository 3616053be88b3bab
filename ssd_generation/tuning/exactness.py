"""Batch invariance of a model's passes, determined on this machine: do their bits depend on their width?

A forced text is decoded by passes of each width, and the logits of every token are compared bitwise. The widths that
agree form the certificate (`BatchInvariance`), which is stored with the other measurements: it holds for the model, its
dtype, the processor, the number of threads and the versions of torch and transformers.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..cache.arena import BUCKETS
from ..cache.buffered_layers import add_buffers
from ..cache.recurrent import has_states
from ..forward.captured.batch_invariance import LINEARS, NATIVE, REPLAYED, WIDTHS, BatchInvariance
from ..forward.captured.passes import captured_target
from ..forward.cuda_graph.graph_passes import GraphPasses
from ..forward.cuda_graph.single_pass import Tokens
from ..forward.eager.module_states import fill_cache
from ..forward.forward import Context, Forward
from ..forward.pass_plan import PassPlan
from ..forward.structure.positions import cut_to_table
from ..forward.structure.sublayers import input_device
from ..native.codegen.compiler import why_not
from ..support.bounds import Number
from ..support.measurements import cached_measurement, flag_if_noisy
from ..support.model_state import Part, state_of
from ..support.parallel import broadcast
from ..support.progress import progress_bar
from ..support.source_code import code_of, code_of_package
from ..support.timing import Stopwatch
from .measuring import describe_model, time_interleaved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "HOW_TO_ASK",
    "Certificate",
    "ExactnessPart",
    "batch_invariance_of_captured",
    "batch_invariance_of_graphs",
    "certificate_of",
    "cost_of",
    "is_free",
]

HOW_TO_ASK = 'exactness="bitwise" requests them'
"""Ending of the reason where bitwise passes are expensive; the command line has an option for it."""

_FREE = {torch.float32: 1.02, torch.bfloat16: 1.05, torch.float16: 1.05}
"""Highest cost of bitwise passes, relative to other passes, at which they are used without being requested."""

_PROMPT, _NEW = 21, 24
_BASES = (1, 2, 4, 8, 16)
"""Widths that a single token may be padded to."""

_FEW_PASSES = 2
"""Number of passes of each width by JIT-compiled kernels through recurrent states: invariant by design, this only
confirms it."""

_TIMED = (1, 4, 8)
"""Tokens of the passes whose times are compared."""

_SECONDS = 3.0
_RATIO = Number(1e-3, 1e3, "a ratio of times")


class ExactnessPart(Part):
    """Batch invariance of a model's captured passes, by requested exactness and what else it depends on."""

    def __init__(self) -> None:
        self.exactness: dict[Any, tuple[BatchInvariance | None, str | None]] = {}


@dataclass(frozen=True)
class Certificate:
    """Result of checking a model for batch invariance on a machine.

    Attributes:
        batch_invariance: kernel and widths of passes whose bits do not depend on their width; `None` where there are
            none.
        refusal: reason why there are none.
    """

    batch_invariance: BatchInvariance | None
    refusal: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain JSON types."""
        return {
            "linear": None if self.batch_invariance is None else self.batch_invariance.linear,
            "widths": [] if self.batch_invariance is None else list(self.batch_invariance.widths),
            "refusal": self.refusal,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Certificate:
        """Build a certificate from `to_dict`'s result; raise on anything wrong with what was stored."""
        if data["linear"] is None:
            return cls(None, refusal=str(data["refusal"]))
        widths = tuple(data["widths"])
        if data["linear"] not in LINEARS or not widths or widths != tuple(w for w in WIDTHS if w in widths):
            raise ValueError(f"there are no passes by {data['linear']!r} of the widths {data['widths']!r}")
        return cls(BatchInvariance(data["linear"], widths))


def batch_invariance_of_captured(
    model: PreTrainedModel, exactness: str | None
) -> tuple[BatchInvariance | None, str | None]:
    """Return how captured passes keep their bits independent of their width, or `None` and why they do not.

    Args:
        model: the target model; its passes can be captured.
        exactness: the requested exactness, not "numeric".
    """
    # Describing the model takes milliseconds: once is enough while nothing that the answer depends on changes.
    known = state_of(model).get(ExactnessPart).exactness
    key = (exactness, model.dtype, torch.get_num_threads())
    if key not in known:
        known[key] = _decide(model, exactness)
    found: tuple[BatchInvariance | None, str | None] = known[key]
    return found


def _decide(model: PreTrainedModel, exactness: str | None) -> tuple[BatchInvariance | None, str | None]:
    """Return the answer of `batch_invariance_of_captured`, not memoised."""
    if exactness is None and not is_free(model):
        if has_states(model):
            return None, f"some of its attention has no kernel here; {HOW_TO_ASK}"
        # Timed before the bits are checked, which takes longer.
        if (cost := cost_of(model)) > _FREE.get(model.dtype, 1.0):
            return None, f"bitwise passes would take {cost - 1:.0%} longer here; {HOW_TO_ASK}"
    found = certificate_of(model)
    return found.batch_invariance, found.refusal


def batch_invariance_of_graphs(
    model: PreTrainedModel, passes: GraphPasses
) -> tuple[BatchInvariance | None, str | None]:
    """Return how CUDA graphs keep their bits independent of their width, or `None` and why they do not.

    Args:
        model: the target model.
        passes: its CUDA graphs, from `target_graphs`.
    """
    if passes.refusal is not None:
        return None, f"its passes are not replayed: {passes.refusal}"
    if not passes.is_checked:
        return None, "its passes have not been captured yet"
    if passes.keeps_bits is None:
        with torch.no_grad():
            passes.keeps_bits = _same_bits(model, passes)
    if passes.keeps_bits is None:
        return None, "another text was being decoded, so its passes could not be compared bitwise"
    if not passes.keeps_bits:
        return None, "a token's logits depend on its place in a pass"
    return BatchInvariance(REPLAYED, passes.widths), None


def _same_bits(model: PreTrainedModel, passes: GraphPasses) -> bool | None:
    """Tell whether replayed passes give each token the same bits at every place; `None` where they cannot run now."""
    # The text crosses the end of a bucket: passes read one bucket or the next for the same token.
    text = _Text(model, BUCKETS[0] - passes.widths[-1] - _NEW // 2)

    def logits_by(count: int) -> torch.Tensor | None:
        cache, at, parts = text.cache(), 0, []
        while at < _NEW:
            ids, slot = text.ids[:, at : at + count], text.prompt + at
            results = passes.run(cache, Tokens((), ids), slot, slot, records=True)
            if results is None:
                return None
            parts.append(results[0][0].clone())
            at += count
        passes.arena.take_back(cache, keeps=False)
        return torch.cat(parts)

    passes.use_narrower(False)
    found = [logits_by(count) for count in (1, 5, passes.widths[-1])]
    if any(logits is None for logits in found):
        return None
    first = cast(torch.Tensor, found[0])
    if not all(torch.equal(cast(torch.Tensor, logits), first) for logits in found):
        return False
    cache = text.cache()
    is_faster = passes.consider_narrower(cache, Tokens((), text.ids[:, :1]), text.prompt)
    passes.arena.take_back(cache, keeps=False)
    if is_faster:
        passes.use_narrower(True, BUCKETS[:2])
        narrower = logits_by(1)
        has_same_bits = narrower is not None and torch.equal(narrower, first)
        passes.use_narrower(has_same_bits, BUCKETS[:2] if has_same_bits else ())
    return passes.refusal is None


class _NotFree(Exception):
    """Bitwise passes have a price."""


def is_free(model: PreTrainedModel) -> bool:
    """Tell whether bitwise passes cost nothing extra: JIT-compiled kernels do all of a layer, for any request.

    Where that is known from an earlier process, nothing is captured before the first token of this one.
    """
    if NATIVE not in _kernels(model):
        return False
    passes = captured_target(model, BatchInvariance(NATIVE, WIDTHS))
    if passes is None:
        return False

    def attends_by_kernels() -> bool:
        program = passes.program(_TIMED[-1])
        if program is None or not program.attends_by_kernels:
            raise _NotFree
        return True

    try:
        if passes.has_begun:
            return attends_by_kernels()
        described = {"what": "free", **describe_model(model), "code": code_of(model), "found by": code_of_package()}
        return cached_measurement(model, described, attends_by_kernels) is True
    except _NotFree:
        return False


def certificate_of(model: PreTrainedModel, again: bool = False) -> Certificate:
    """Return the certificate of a model on this machine: known, or determined now (seconds).

    Args:
        model: the target model; its passes can be captured.
        again: determine it anew.
    """
    described = _described(model, "exactness")
    found = cached_measurement(model, described, lambda: _find_out(model), again, use=Certificate.from_dict)
    return Certificate.from_dict(found)


def _find_out(model: PreTrainedModel) -> Any:
    """Determine a certificate; return it as a dictionary."""
    with (
        torch.no_grad(),
        progress_bar(len(WIDTHS), "Checking this model's passes for bitwise exactness here, once") as bar,
    ):
        text = _Text(model)
        for name in _kernels(model):
            bar.reset()
            if name == NATIVE and not has_states(model):
                if agreeing := _confirmed(text, bar.update):
                    return Certificate(BatchInvariance(name, agreeing)).to_dict()
                continue
            logits: dict[int, torch.Tensor | None] = {}
            for width in WIDTHS:
                # Full passes, with the tokens at other places than in passes of other widths.
                starts = {max(width // 2, 1), *([width] if 2 * width > _NEW and name != NATIVE else [])}
                most = _FEW_PASSES if name == NATIVE else _NEW
                first, *others = [text.logits(name, width, start, most) for start in starts]
                same = first is not None and all(got is not None and _same(got, first) for got in others)
                logits[width] = first if same else None
                bar.update()
            agreeing = _agreeing(logits)
            if len(agreeing) == 1 and 2 * agreeing[0] <= _NEW:
                # The only width has to agree with itself: a token's bits must not depend on its place in the pass.
                once, again = logits[agreeing[0]], text.logits(name, agreeing[0], agreeing[0])
                agreeing = agreeing if once is not None and again is not None and torch.equal(once, again) else ()
            if agreeing:
                return Certificate(BatchInvariance(name, agreeing)).to_dict()
    reason = text.refusal or "no kernel here gives a token the same bits at every place in a pass"
    return Certificate(None, refusal=reason).to_dict()


def _confirmed(text: _Text, progress: Callable[[], Any]) -> tuple[int, ...]:
    """Return the widths at which JIT-compiled kernels give every token the same bits; empty unless 1 is one of several.

    These kernels are batch-invariant by design, so one pass of each width confirms it. It covers the last tokens of the
    text, after the keys and values of a pass over all tokens, and must give the logits of that pass. Every second width
    is tested with one token less, filled up.

    Args:
        text: the text that is decoded.
        progress: called after each width.
    """
    cache = text.cache()
    every = text.run(NATIVE, cache, 0, _NEW, _NEW)
    if every is None:
        return ()
    agreeing = []
    for index, width in enumerate(WIDTHS):
        count = width - index % 2 if width > 2 else width
        cache.crop(-count)
        logits = text.run(NATIVE, cache, _NEW - count, count, width)
        if logits is not None and torch.equal(logits, every[_NEW - count :]):
            agreeing.append(width)
        progress()
    return tuple(agreeing) if agreeing[:1] == [1] and len(agreeing) > 1 else ()


def _agreeing(logits: dict[int, torch.Tensor | None]) -> tuple[int, ...]:
    """Return widths that give every token the same bits, starting at one that a single token may be padded to."""
    best: tuple[int, ...] = ()
    for base in _BASES:
        wanted = logits[base]
        if wanted is None:
            continue
        found: list[int] = [base]
        for width, got in logits.items():
            if width > base and got is not None and all(_same(got, cast(torch.Tensor, logits[w])) for w in found):
                found.append(width)
        if len(found) > len(best) and found != [1]:  # width 1 alone would verify a draft token by token
            best = tuple(found)
    return best


def _same(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Tell whether two logits, `(n, V)`, have the same bits for the tokens that both have."""
    count = min(len(logits), len(others))
    return torch.equal(logits[:count], others[:count])


class _Text:
    """A text of random tokens after a prompt, decoded by passes of one width.

    Attributes:
        prompt: number of tokens of the prompt.
        refusal: reason why the latest passes that could not be captured could not.
    """

    def __init__(self, model: PreTrainedModel, prompt: int = _PROMPT) -> None:
        self.model = model
        prompt = self.prompt = cut_to_table(model, prompt, _NEW)
        self.refusal: str | None = None
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        generator = torch.Generator(device="cpu").manual_seed(0)
        device = input_device(model)
        ids = torch.randint(0, vocabulary, (1, prompt + _NEW), generator=generator, device="cpu").to(device)
        self.ids = ids[:, prompt:]
        self._cache: Cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        fill_cache(model, ids[:, :prompt], self._cache)

    def cache(self) -> Cache:
        """Return a writable cache of the prompt."""
        cache = copy.deepcopy(self._cache)
        add_buffers(cache)
        return cache

    def context(self) -> Context:
        """Return the context at the end of the prompt."""
        positions = torch.full((1, 1), self.prompt, device=self.ids.device)
        return Context(self.cache(), length=self.prompt, positions=positions)

    def logits(self, linear: str, width: int, first: int, most: int = _NEW) -> torch.Tensor | None:
        """Return the logits of all tokens, by passes of this width; `None` where these cannot be captured.

        Args:
            linear: kernel of the linear layers.
            width: width of all passes.
            first: number of tokens in the first pass, which is padded; the others are full.
            most: maximum number of passes; the tokens after them are left out.
        """
        cache, at, count = self.cache(), 0, first
        found: list[torch.Tensor] = []
        while at < _NEW and len(found) < most:
            count = min(count, _NEW - at)
            logits = self.run(linear, cache, at, count, width)
            if logits is None:
                return None
            found.append(logits)
            at += count
            count = width
        return torch.cat(found)

    def run(self, linear: str, cache: Cache, at: int, count: int, width: int) -> torch.Tensor | None:
        """Return the logits `(count, V)` of one pass; `None` where it cannot be captured, with `refusal`.

        Args:
            linear: kernel of the linear layers.
            cache: cache of the tokens before, to which these are appended.
            at: index of the first of the tokens.
            count: number of tokens.
            width: width that the pass is filled up to.
        """
        passes = captured_target(self.model, BatchInvariance(linear, WIDTHS))
        if passes is None:
            return None
        positions = torch.arange(self.prompt + at, self.prompt + at + count, device=self.ids.device)[None]
        logits = passes.run(cache, self.ids[:, at : at + count], positions, width=width)
        if logits is not None:
            return logits[0].clone()
        if passes.uneven is not None:
            self.refusal = f"{passes.uneven} may round a token differently, depending on its place in a pass"
        elif passes.refusal is not None:
            self.refusal = passes.refusal.removeprefix("CannotCapture: ")
        return None


def _described(model: PreTrainedModel, what: str) -> dict[str, Any]:
    """Describe all that a measurement of a model's bitwise passes depends on."""
    return {"what": what, **describe_model(model), "kernels": _kernels(model), "widths": list(WIDTHS), "format": 4}


def _kernels(model: PreTrainedModel) -> list[str]:
    """Return kernels for the linear layers in the order in which they are tried: the faster one first."""
    usual = ["onednn", "linear"] if model.dtype == torch.float32 else ["linear", "onednn"]
    return [name for name in (NATIVE, *usual) if name in LINEARS and (name != NATIVE or why_not() is None)]


def cost_of(model: PreTrainedModel) -> float:
    """Return the time of passes meant to be bitwise, relative to other passes', over 1, 4 and 8 tokens."""

    def use(ratio: Any) -> None:
        _RATIO.check("The cost of exact passes", ratio)

    described = _described(model, "cost of exactness")
    found: float = cached_measurement(model, described, lambda: _cost(model), use=use)
    return found


def _cost(model: PreTrainedModel) -> Any:
    """Measure `cost_of`: a number, or a `NoisyMeasurement` of one."""
    with torch.no_grad():
        text = _Text(model)

        def passes(batch_invariance: BatchInvariance | None) -> Callable[[int], float]:
            forward, context = Forward(model, plan=PassPlan(batch_invariance=batch_invariance)), text.context()

            def once(count: int) -> float:
                watch = Stopwatch(text.ids.device)
                watch.start()
                forward.target(text.ids[:, :count], context).logits[:, -count:].float().argmax(-1).tolist()
                context.cache.crop(-count)
                watch.stop()
                return watch.seconds()

            for count in _TIMED:
                once(count)  # capture, first touch
            return once

        usual, exact = passes(None), passes(BatchInvariance(_kernels(model)[0], WIDTHS))
        ratios, times = [], []
        for count in _TIMED:
            timings = time_interleaved(
                partial(usual, count),
                {count: partial(exact, count)},
                is_over=lambda repeats, spent: broadcast(model, repeats >= 3 and spent > _SECONDS / len(_TIMED)),
            )
            ratios.append(timings.ratio(count))
            times += timings.seconds
    return flag_if_noisy(statistics.geometric_mean(ratios), times)
