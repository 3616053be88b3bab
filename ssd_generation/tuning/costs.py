"""Costs of a draft step and of verification passes on this machine: measured once, stored on the disk."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..cache.buffered_layers import BufferedLayer, add_buffers
from ..cache.own_lists import new_cache
from ..cache.recurrent import Checkpoint, has_states
from ..config import Costs, SelfSpeculativeConfig, SkipConfig
from ..config.values import SECONDS
from ..forward.copies.low_bit import copies_of
from ..forward.copies.resident import drafting_model
from ..forward.cuda_graph.graph_passes import NARROWER, GraphPart, target_graphs
from ..forward.eager.module_states import fill_cache
from ..forward.eager.row_by_row import RowByRowPart
from ..forward.forward import Context, Forward
from ..forward.pass_plan import PassPlan
from ..forward.structure.offloaded import is_offloaded, streamed_bytes
from ..forward.structure.positions import cut_to_table
from ..forward.structure.skip_mode import SkipMode
from ..forward.structure.sublayers import input_device, layout_of
from ..native.codegen.compiler import why_not
from ..support.bounds import Number
from ..support.devices import wait_for
from ..support.measurements import NoisyMeasurement, cached_measurement, flag_if_noisy, value_of
from ..support.model_state import state_of
from ..support.parallel import broadcast
from ..support.progress import progress_bar
from ..support.tensors import argmax
from ..support.timing import Stopwatch
from .measuring import describe_machine, describe_model, time_interleaved
from .plan_passes import plan_passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Passes", "costs_of", "measure_costs", "rows_measured"]

VERIFIED = (2, 3, 4, 5, 6, 8, 10, 13)
"""Lengths of the verification passes that are measured; 13: the pending token and the 12 drafted ones of a longest
round."""

_VERIFIED_BATCH = (2, 3, 5, 9)
"""The same for a batch, where every further token per row widens the pass by all rows."""

LONGEST_VERIFIED = 32
"""Length of the longest verification pass that `Passes` can make."""

_RATIO = Number(1e-6, 1e6, "a number of plain steps")
_CONTEXT = 64
_READ = 16
"""Tokens of a context whose keys and values are computed; they are repeated as those of the others where possible."""
_LONG = 512
_TRIES = 6
"""Most passes made until CUDA graphs have been captured and checked."""
_REPEATS = 3
_UNSEEN = 0.005
"""Seconds assumed of a replayed pass before one has been timed; only ratios of costs matter."""
_DOUBLES = 256
"""Further tokens of a replayed pass over a batch that double its time, about: weights are still read once."""
_ENOUGH_SECONDS = 0.1
"""Seconds for each pass, and the plain step: beyond their sum `_REPEATS` repetitions are enough."""
_SECONDS = 5.0
"""Seconds beyond which fewer repetitions are enough: a large model's passes vary less."""
_SLOW = 0.05
"""Seconds of a plain step from which on half of the lengths and `_SLOW_REPEATS` repetitions are enough: a first call
waits for them, and the times of long passes vary less."""
_SLOW_REPEATS = 2


# ----------------------------------------------------------------------------------------------------------------------
# measuring


def measure_costs(model: PreTrainedModel, config: SelfSpeculativeConfig) -> Costs:
    """Measure a plain step, a draft step and verification passes of this library's loop, in seconds, on random tokens.

    The passes are interleaved with plain steps, and each counts relative to the plain steps next to it, so that a
    machine that slows down meanwhile slows both; the medians are taken.

    Args:
        model: the target model.
        config: sub-layers that the draft skips, and its precision.

    Returns:
        The costs, with `measured_on` set. For a model with recurrent states, the cost of verifying a token includes
        taking it through the next pass again, which follows where a token is rejected.
    """
    if is_offloaded(model):
        return _streamed(_time_streams(model), _resident_step(model, config), model, config)
    verify = value_of(_measure(model, None, VERIFIED, "verification", config))
    return _put_together(model, verify, value_of(_draft_ratio(model, config)))


def rows_measured(rows: int) -> int:
    """Return the batch size whose measured costs are used for a batch of so many rows: the next power of two."""
    return 1 << (rows - 1).bit_length()


def _plan(model: PreTrainedModel, config: SelfSpeculativeConfig, rows: int) -> PassPlan:
    """Plan the passes whose costs are measured. Replayed ones are the same, batch-invariant or not."""
    plan = plan_passes(model, rows, config.exactness)
    is_replayed = plan.batch_invariance is not None and plan.batch_invariance.is_replayed
    return dataclasses.replace(plan, batch_invariance=None) if is_replayed else plan


def _draft_ratio(model: PreTrainedModel, config: SelfSpeculativeConfig, shows: bool = True, rows: int = 1) -> Any:
    """Return the cost of a draft step in plain steps."""
    if not config.drafts_itself:
        return 1.0
    measured = _measure(model, config, [0], "drafting", config, shows, rows)
    times = value_of(measured)
    ratio = times[0] / times[1]
    return NoisyMeasurement(ratio) if isinstance(measured, NoisyMeasurement) else ratio


def _put_together(model: PreTrainedModel, verify: dict[int, float], draft_ratio: float) -> Costs:
    plain = verify[1]
    # Where states are restored, accepted tokens go through the next pass again, up to all rows of this one.
    times = 2 if has_states(model) else 1
    return Costs(
        plain_step=plain,
        draft_step=draft_ratio * plain,
        verify=[(n, plain + times * max(seconds - plain, 0.0)) for n, seconds in sorted(verify.items())],
        measured_on=describe_machine(model),
    )


def _measure(
    model: PreTrainedModel,
    config: SelfSpeculativeConfig | None,
    lengths: Sequence[int],
    what: str,
    asked: SelfSpeculativeConfig,
    shows: bool = True,
    rows: int = 1,
) -> Any:
    """Return seconds by length of the pass in tokens, 0 for a draft step: a dictionary, or a `NoisyMeasurement` of one.

    The target's passes are planned for `asked`.
    """
    with (
        torch.no_grad(),
        progress_bar(
            _count(lengths, _REPEATS),
            f"Measuring the cost of {what}{'' if rows == 1 else f' in batches of {rows}'} here, once",
            shows=shows,
        ) as bar,
    ):
        passes = Passes(model, config, plan=_plan(model, asked, rows), rows=rows)
        passes.settle()
        passes.once(1)  # capture, first touch
        is_slow = broadcast(model, passes.once(1) >= _SLOW)
        least = _SLOW_REPEATS if is_slow else _REPEATS
        if is_slow:
            lengths = lengths[::-2][::-1]  # the longest among them
            bar.reset(_count(lengths, least))
        for length in lengths:
            passes.once(length)  # capture, first touch
            bar.update()
        timings = time_interleaved(
            partial(passes.once, 1),
            {length: partial(passes.once, length) for length in lengths},
            # Processes that compute one model together stop together.
            is_over=lambda repeats, spent: broadcast(
                model, spent > (_ENOUGH_SECONDS * (1 + len(lengths)) if repeats >= least else _SECONDS)
            ),
            progress=lambda repeats, count: bar.update(count) if repeats < least else None,
        )
        passes.end()
    return flag_if_noisy(
        {1: timings.plain} | {length: timings.plain * timings.ratio(length) for length in lengths}, timings.seconds
    )


def _count(lengths: Sequence[int], repeats: int) -> int:
    """Return the number of passes that `_measure` makes at least: the first ones, and repetitions with plain steps."""
    return len(lengths) + repeats * (len(lengths) + -(-len(lengths) // 2))


class Passes:
    """Passes of a round after a text of random tokens, on a cache created for them; enter `torch.no_grad` first.

    Args:
        model: the target model.
        config: sub-layers that the draft skips, and its precision; `None` for the target model's passes alone.
        context: number of tokens in the cache, as far as the model has positions for these and a longest pass.
        cache: cache to share with other passes after the same context; `None` creates one.
        plan: how passes are run; `None`: captured where there is a single row, batch-invariant or not.
        rows: number of rows, B.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: SelfSpeculativeConfig | None,
        context: int = _CONTEXT,
        cache: Cache | None = None,
        plan: PassPlan | None = None,
        rows: int = 1,
    ) -> None:
        self.model = model
        context = self.context = cut_to_table(model, context, LONGEST_VERIFIED)
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        device = input_device(model)
        generator = torch.Generator(device="cpu").manual_seed(0)
        prompt = torch.randint(0, vocabulary, (rows, context), generator=generator, device="cpu").to(device)
        self.tokens = torch.randint(0, vocabulary, (rows, LONGEST_VERIFIED), generator=generator, device="cpu").to(
            device
        )
        self.cache = _cache_after(model, prompt) if cache is None else cache
        self.checkpoint = Checkpoint.of(self.cache, context)
        self.forward = Forward(model, config, plan or PassPlan(captured=rows == 1, graph=rows == 1, rows=rows))

    def settle(self) -> None:
        """Make passes until those to be replayed have been captured and checked, or given up."""
        for _ in range(_TRIES):
            if self.forward.is_trying_to_replay:
                self.once(1)

    def end(self) -> None:
        """Release the buffers that another text may need."""
        self.forward.end(self.cache, keeps=False)

    def once(self, length: int) -> float:
        """Return the seconds of one pass over `length` tokens, or of a draft step where it is 0; the cache is restored.

        On CUDA the device's own events measure it, time spent waiting for the host between kernels included.
        """
        count = max(length, 1)
        ids = self.tokens[:, :count]
        context = Context(
            self.cache,
            length=self.context,
            mask=torch.ones((len(ids), self.context + 1), dtype=torch.long, device=ids.device),
            positions=torch.full((len(ids), 1), self.context, device=ids.device),
            limit=self.context + _LONG,  # long enough for capture to pay off
            checkpoint=self.checkpoint,
        )
        watch = Stopwatch(ids.device)
        wait_for(ids.device)
        watch.start()
        if length:
            logits = self.forward.target(ids, context).logits
        else:
            with self.forward.draft(context, len(ids), 1) as passes:
                logits = passes(ids, 0)
        argmax(logits[:, -count:]).tolist()
        if self.checkpoint is not None:
            self.checkpoint.restore(self.cache)
        elif length:
            self.cache.crop(-count)
        watch.stop()
        return watch.seconds()


def _cache_after(model: PreTrainedModel, prompt: torch.Tensor) -> Cache:
    """Return a cache that holds a text of random tokens."""
    cache = new_cache(model)
    add_buffers(cache)
    first = prompt[:, :_READ]
    fill_cache(model, first, cache)
    if prompt.shape[1] == first.shape[1]:
        return cache
    if all(type(layer) is BufferedLayer for layer in cache.layers):
        # A pass takes as long whatever the cache holds: repeating the same keys and values will do.
        for layer in cache.layers:
            times = -(-prompt.shape[1] // first.shape[1])
            keys, values = (x.repeat(1, 1, times, 1)[:, :, : prompt.shape[1]] for x in (layer.keys, layer.values))
            layer.adopt(keys.contiguous(), values.contiguous())
    else:
        fill_cache(model, prompt[:, first.shape[1] :], cache)
    return cache


# ----------------------------------------------------------------------------------------------------------------------
# storing


def costs_of(
    model: PreTrainedModel, config: SelfSpeculativeConfig, again: bool = False, shows: bool = True, rows: int = 1
) -> Costs:
    """Return the costs of this model and config on this machine: from memory, from the disk, or measured now.

    Args:
        model: the target model.
        config: sub-layers that the draft skips, and its precision.
        again: measure anew.
        shows: show a progress bar where the draft is measured; not in the middle of a text.
        rows: batch size, as returned by `rows_measured`.
    """
    if is_offloaded(model):
        return _costs_of_streamed(model, config, again)
    if not config.drafts_itself and (known := _costs_of_graphs(model, rows)) is not None:
        return known
    plan = _plan(model, config, rows)
    batch_invariance = plan.batch_invariance
    shape = {
        **describe_model(model),
        "invariant": None if batch_invariance is None else dataclasses.asdict(batch_invariance),
    }
    passes = state_of(model).get(GraphPart).passes.get(None)
    if rows == 1 and passes is not None and passes.narrower_saves:
        shape["narrower"] = True
    if (how := state_of(model).get(RowByRowPart).row_by_row.get(rows > 1)) is not None:
        shape["row by row"] = how
    if rows > 1:
        shape["rows"] = rows
    if batch_invariance is None:
        shape["own kernels"] = plan.own_kernels or why_not() is not None

    def put_together(verify: Any, ratio: Any) -> Costs:
        # Read from the disk, so checked.
        times = {int(n): SECONDS.check(f"The time of {n} tokens", seconds) for n, seconds in verify.items()}
        return _put_together(model, times, _RATIO.check("The cost of a draft step", ratio))

    verify = cached_measurement(
        model,
        {"what": "verify", **shape},
        lambda: _measure(model, None, VERIFIED if rows == 1 else _VERIFIED_BATCH, "verification", config, shows, rows),
        again,
        use=lambda result: put_together(result, 1.0),
    )
    draft = {
        "what": "draft",
        **shape,
        "skip": config.skip.to_dict(),
        "precision": None if config.precision is None else config.precision.to_dict(),
        "itself": config.drafts_itself,
    }
    ratio = cached_measurement(
        model,
        draft,
        lambda: _draft_ratio(model, config, shows, rows),
        again,
        use=lambda result: put_together(verify, result),
    )
    return put_together(verify, ratio)


def _costs_of_graphs(model: PreTrainedModel, rows: int) -> Costs | None:
    """Return the costs of a model whose passes are replayed, for drafts that cost nothing; `None` for any other model.

    All passes over a single text have one width, so that they cost the same; a pass over one token costs less where a
    narrower graph replaces it. Their times were noted when the graphs were captured: measuring them would delay a first
    call by the time of some hundred tokens. Those of a batch are estimated, by the number of all tokens.
    """
    passes = target_graphs(model, rows)
    if passes is None or passes.refusal is not None:
        return None
    if rows > 1:
        return Costs(
            plain_step=_UNSEEN,
            draft_step=_UNSEEN,
            verify=[(width, _UNSEEN * (1 + rows * (width - 1) / _DOUBLES)) for width in passes.widths],
            measured_on=describe_machine(model),
        )
    width = passes.widths[-1]
    usual = passes.seconds.get(width, _UNSEEN)
    plain = passes.seconds[NARROWER] if passes.narrower_saves else usual
    return Costs(
        plain_step=plain,
        draft_step=plain,
        verify=[(1, plain), *((length, usual) for length in range(2, width + 1))],
        measured_on=describe_machine(model),
    )


# ----------------------------------------------------------------------------------------------------------------------
# offloaded weights

_SAMPLE = 0.06
"""Share of the weights from which the cost of a pass is extrapolated: a whole pass may take a minute."""
_WIDTHS = (1, 64)
"""Widths in tokens of the passes whose cost is extrapolated: each reads all weights, and a wider one computes more."""
_DRAFT_STEPS = 7


def _costs_of_streamed(model: PreTrainedModel, config: SelfSpeculativeConfig, again: bool) -> Costs:
    """Return the costs of a model whose weights are brought into memory for each pass; otherwise as `costs_of`."""
    shape = describe_model(model)

    def times_of(found: Any) -> dict[int, float]:
        return {int(n): SECONDS.check(f"The time of {n} tokens", seconds) for n, seconds in found.items()}

    verify = cached_measurement(
        model, {"what": "streamed", **shape}, lambda: _time_streams(model), again, use=lambda found: times_of(found)[1]
    )
    step: float | None = None
    if config.precision:
        described = {
            "what": "draft in memory",
            **shape,
            "skip": config.skip.to_dict(),
            "precision": config.precision.to_dict(),
        }
        step = cached_measurement(
            model,
            described,
            lambda: _resident_step(model, config),
            again,
            use=lambda seconds: SECONDS.check("The time of a draft step", seconds),
        )
    return _streamed(times_of(verify), step, model, config)


def _streamed(
    verify: dict[int, float], step: float | None, model: PreTrainedModel, config: SelfSpeculativeConfig
) -> Costs:
    """Build costs from passes over one and over many tokens and a draft step, `None` where that reads weights, too."""
    costs = _put_together(model, verify, 1.0)
    if step is None:
        layout = layout_of(model)
        skipped = layout.skipped_parameters(config.skip) / max(layout.num_parameters, 1) if len(config.skip) else 0.0
        step = costs.plain_step * max(1.0 - skipped, 1e-6)
    return dataclasses.replace(costs, draft_step=step)


def _time_streams(model: PreTrainedModel) -> dict[int, float]:
    """Estimate seconds of a pass by width, by timing some of its linear layers, offloaded ones and others.

    No layer is run twice: the system caches a file that was just read.
    """
    sizes: dict[bool, int] = {True: streamed_bytes(model), False: 0}
    sizes[False] = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type != "meta")
    total = dict.fromkeys(_WIDTHS, 0.0)
    for is_streamed, size in sizes.items():
        layers = [
            m for m in model.modules() if type(m) is nn.Linear and (m.weight.device.type == "meta") is is_streamed
        ]
        if not layers or not size:
            continue
        for place, width in enumerate(_WIDTHS):
            # Spread over the model, different layers for each width.
            candidates = layers[place :: len(_WIDTHS)] or layers
            wanted, seen, seconds = _SAMPLE * size, 0, 0.0
            for at in _spread(len(candidates)):
                layer = candidates[at]
                weight = layer.weight
                x = torch.ones((1, width, layer.in_features), dtype=weight.dtype, device=input_device(model))
                started = time.perf_counter()
                with torch.no_grad():
                    layer(x)
                seconds += time.perf_counter() - started
                seen += weight.numel() * weight.element_size()
                if seen >= wanted:
                    break
            total[width] += seconds * size / seen
    if not all(total.values()):  # no linear layers of torch's: time whole passes
        with torch.no_grad():
            passes = Passes(model, None)
            total = {width: passes.once(min(width, LONGEST_VERIFIED)) for width in _WIDTHS}
            passes.end()
    return total


def _spread(count: int) -> list[int]:
    """Return 0 … count − 1 in an order whose first few are spread evenly."""
    return sorted(range(count), key=lambda at: (at * 0.6180339887498949) % 1)


def _without_skipping(other: PreTrainedModel, config: SelfSpeculativeConfig) -> SkipMode:
    """Compute with the copies of a config but skip nothing: the cache has to be filled in all layers."""
    assert config.precision is not None
    return SkipMode(other, SkipConfig(), copies_of(other, config.skip, config.precision).forwards())


def _resident_step(model: PreTrainedModel, config: SelfSpeculativeConfig) -> float | None:
    """Return the seconds of a draft step that reads no offloaded weight, or `None`; the target is not run."""
    other = drafting_model(model, config)
    if other is model:
        return None
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    prompt = torch.randint(
        0,
        vocabulary,
        (1, cut_to_table(model, _CONTEXT, LONGEST_VERIFIED)),
        generator=torch.Generator(device="cpu").manual_seed(0),
        device="cpu",
    )
    with torch.no_grad():
        with _without_skipping(other, config):
            cache = _cache_after(other, prompt)
        passes = Passes(model, config, cache=cache)
        passes.once(0)  # capture, first touch
        return statistics.median(passes.once(0) for _ in range(_DRAFT_STEPS))
