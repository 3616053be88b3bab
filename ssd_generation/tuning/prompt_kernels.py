"""Choice of captured passes for reading prompts: they must have the bits of decoding, and pay.

The arithmetic of linear layers and experts is compared on a few rows of each kind of matrix and on two experts, by the
JIT-compiled kernels and by torch's: a fraction of a second, once per machine. Unless torch's are far ahead, a short
prompt is read in both ways, since a captured pass does what lies between the linear layers in less time. Together with
the time of attention that shows how long a prompt may be for the kernels to pay. On a processor with AVX2 alone torch
has no fast product of bfloat16 matrices, and a prompt takes a sixth of the time. Where what was read is to be reused,
bits count more than the time of a first reading.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache

from ..cache.buffered_layers import add_buffers
from ..cache.own_lists import new_cache
from ..cache.prefix_cache import Recurrent, Start, States, whole_text
from ..cache.recurrent import copied_states, has_states
from ..forward.captured.batch_invariance import NATIVE, BatchInvariance
from ..forward.captured.prompt_passes import prompt_passes
from ..forward.eager.prompt_parts import read_in_parts
from ..forward.eager.row_by_row import has_scans_of_its_own
from ..forward.structure.expert_layers import experts_of, native_experts, run_experts, runs_through_interface
from ..forward.structure.positions import cut_to_table
from ..forward.structure.sublayers import input_device
from ..native.ops.attention import attend_to_themselves
from ..native.ops.linear import Linear, native_linear
from ..support.bounds import Number
from ..support.measurements import cached_measurement, flag_if_noisy
from .measuring import describe_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PART", "longest_by_kernels", "part_of_prompts", "prompt_cost", "reads_prompts"]

PART = 256
"""Tokens of a part of a prompt: enough for torch's fastest kernels, and few to read again after a reused prefix."""

_PAYS = 1.05
"""Highest cost of the JIT-compiled kernels, relative to torch's, at which they read prompts where no whole prompt is
timed: where later calls reuse keys and values, and of models for which it takes long, so that what lies between the
linear layers matters little."""

_MAY_PAY = 1.6
"""The same at which a whole prompt is timed. With SmolLM2-135M in float32 on an Intel Xeon linear layers cost 1.27, and
64 tokens take 0.09 s instead of 0.14, 256 tokens 0.32 instead of 0.35; in bfloat16 they cost 0.9 to 1.07, and 64 tokens
take 0.04 s instead of 0.09, 500 tokens 0.21 instead of 0.28 (`tests.lab.prompts`)."""

_PAYS_REUSED = 4.0
"""The same where later calls reuse keys and values: reading the last fifth of a prompt at this cost is faster than
reading all of it by torch."""

_ROWS = 128
"""Number of prompt tokens that matrices are multiplied by."""

_WORK = 2**27
"""Number of multiplications of a matrix, or of a few of its rows, that is timed."""

_PROBE = 64
"""Number of tokens of the prompt that is read in both ways."""

_LONG = 0.5
"""Seconds from which torch's linear layers take too long over that prompt for it to be timed."""

_ATTENDED = 512
"""Number of tokens whose attention to each other is timed."""

_EXPERTS = 2
"""Number of experts that are timed."""

_REPEATS = 5
_READINGS = 3
"""Readings of that prompt in each way."""
_LOOKS = 3
"""Number of measurements, in all of which the kernels must pay: other load slows torch's threads down more."""
_TOKENS = 40
_REST = 30
"""Tokens after the parts of a text that is read in parts."""
_MOST_APART = 0.1
"""Greatest deviation of logits by parts from those of a reading at once, in standard deviations of these."""
_FEW = 2
"""Tokens over which recurrent states are continued, to see whether they are: by more than one, since transformers' code
for one token is another."""
_LOUDER = 2.0**20
"""Factor of states to be continued, which most of them forget within a few tokens."""
_COST = Number(0, 1e6, "a ratio of times")
_ANY = 10**12
"""Longest prompt where any length pays."""
_LENGTH = Number(0, _ANY, "a number of tokens")


def reads_prompts(
    model: PreTrainedModel, batch_invariance: BatchInvariance | None, even_if_slower: bool = False
) -> bool:
    """Tell whether captured passes read prompts whose keys and values later calls reuse; never recurrent states.

    Args:
        model: the target model.
        batch_invariance: kernel and widths of its decoding passes.
        even_if_slower: whether they may take up to four times as long as torch.
    """
    return _may_read(model, batch_invariance, _PAYS_REUSED if even_if_slower else _PAYS)


def longest_by_kernels(model: PreTrainedModel, batch_invariance: BatchInvariance | None) -> int | None:
    """Return the length of the longest prompt that captured passes read in less time than torch.

    A prompt of `_PROBE` tokens is read in both ways. A longer one takes more time for each token in linear layers, and
    for each pair of tokens in attention; what else lies between these is not counted beyond the short prompt.

    Args:
        model: the target model.
        batch_invariance: kernel and widths of its decoding passes.

    Returns:
        Number of tokens, 0 where captured passes read no prompts; `None` for any.
    """
    if batch_invariance is None or not _may_read(model, batch_invariance, _MAY_PAY):
        return 0
    described = {
        "what": "longest prompts",
        **describe_model(model),
        "widths": list(batch_invariance.widths),
        "prompts": 3,
    }
    longest: float = cached_measurement(
        model,
        described,
        lambda: _measure_longest(model, batch_invariance),
        use=lambda found: _LENGTH.check("The length", found),
    )
    return None if longest >= _ANY else int(longest)


def _may_read(model: PreTrainedModel, batch_invariance: BatchInvariance | None, most: float) -> bool:
    """Tell whether captured passes can read prompts at a cost of at most `most`, with the bits of decoding."""
    if batch_invariance is None or batch_invariance.linear != NATIVE or has_states(model):
        return False
    return prompt_cost(model) <= most and _have_the_bits_of_decoding(model, batch_invariance)


def prompt_cost(model: PreTrainedModel) -> float:
    """Return the time of a prompt's linear layers by JIT-compiled kernels, relative to torch's.

    Args:
        model: the target model.
    """
    described = {"what": "prompts", **describe_model(model), "prompts": 7}
    cost: float = cached_measurement(
        model, described, lambda: _measure(model), use=lambda found: _COST.check("The cost of a prompt", found)
    )
    return cost


def _measure_longest(model: PreTrainedModel, batch_invariance: BatchInvariance) -> Any:
    """Measure `longest_by_kernels`: a number, `_ANY` for any length, or a `NoisyMeasurement` of one."""
    with torch.inference_mode():
        ours, torchs, times = _times(model)
        attention = _times_of_attention(model)
        probe, whole = _PROBE, list[list[float]]()
        if torchs * probe / _ROWS < _LONG:
            probe, whole = _times_of_prompts(model, batch_invariance)
            reading, torchs_reading = map(min, whole)
        else:
            reading, torchs_reading = ours * probe / _ROWS, _PAYS * torchs * probe / _ROWS
    attending, torchs_attending = map(min, attention)
    longest = _break_even(
        probe,
        torchs_reading - reading,
        (ours - torchs) / _ROWS,
        (attending - torchs_attending) / _ATTENDED**2,
    )
    return flag_if_noisy(min(longest, _ANY), [*times, *attention, *whole])


def _break_even(probe: int, gain: float, by_token: float, by_pair: float) -> float:
    """Return the length from which on a prompt takes longer: 0 if one of `probe` tokens does, infinity for none.

    With m tokens more, the loss is `by_token`·m + `by_pair`·((`probe` + m)² − `probe`²); the least m at which it is
    `gain` solves `by_pair`·m² + (`by_token` + 2·`probe`·`by_pair`)·m = `gain`.

    Args:
        probe: number of tokens for which the gain is known.
        gain: seconds that it gains, negative if it loses.
        by_token: seconds lost for each further token.
        by_pair: seconds lost for each further pair of tokens, one of which sees the other.
    """
    if gain <= 0:
        return 0.0
    slope = by_token + 2 * probe * by_pair
    square = slope**2 + 4 * by_pair * gain
    divisor = slope + math.sqrt(square) if square >= 0 else 0.0
    return probe + 2 * gain / divisor if divisor > 0 else math.inf


def _times_of_prompts(model: PreTrainedModel, batch_invariance: BatchInvariance) -> tuple[int, list[list[float]]]:
    """Return a short prompt's length, and the seconds in which captured passes and torch read it, several times."""
    passes = prompt_passes(model, batch_invariance)
    count = cut_to_table(model, _PROBE, 1)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(0, vocabulary, (1, count), generator=_generator(), device="cpu")
    positions = torch.arange(count, device="cpu")[None]

    def read() -> None:
        assert passes is not None
        passes.read(_buffered_cache(model), ids, positions)

    return count, [_seconds(run, _READINGS) for run in (read, partial(_read_at_once, model, ids, positions))]


def _times_of_attention(model: PreTrainedModel) -> list[list[float]]:
    """Return the seconds in which all layers of a model attend by the kernels and by torch's, several times.

    Its config tells how many heads there are; zeros where it does not.
    """
    config = model.config.get_text_config(decoder=True)
    heads, layers = (getattr(config, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
    if type(heads) is not int or type(layers) is not int:
        return [[0.0], [0.0]]
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    if type(of_keys) is not int or type(size) is not int or not size or heads % of_keys:
        return [[0.0], [0.0]]
    query, keys, values = (
        torch.randn((1, many, _ATTENDED, size), generator=_generator(), device="cpu").to(model.dtype)
        for many in (heads, of_keys, of_keys)
    )
    ours = partial(attend_to_themselves, query.transpose(1, 2).contiguous(), keys, values)
    torchs = partial(functional.scaled_dot_product_attention, query, keys, values, is_causal=True, enable_gqa=True)
    return [[layers * seconds for seconds in _seconds(run)] for run in (ours, torchs)]


def _measure(model: PreTrainedModel) -> Any:
    """Measure `prompt_cost`: a number, or a `NoisyMeasurement` of one."""
    cost, times = 0.0, list[list[float]]()
    for _ in range(_LOOKS):
        with torch.inference_mode():
            ours, torchs, found = _times(model)
        if not found:  # no layer has a JIT-compiled kernel
            return 1.0
        if ours / torchs > cost:
            cost, times = ours / torchs, found
        if cost > _MAY_PAY:
            break
    return flag_if_noisy(cost, times)


def _have_the_bits_of_decoding(model: PreTrainedModel, batch_invariance: BatchInvariance) -> bool:
    """Tell whether captured passes over a prompt give what decoding gives to the bit: known, or compared now."""

    def measure() -> bool:
        with torch.inference_mode():
            return _keeps_bits(model, batch_invariance)

    widths = list(batch_invariance.widths)
    described = {"what": "bits of prompts", **describe_model(model), "widths": widths, "prompts": 4}
    return cached_measurement(model, described, measure) is True


def _times(model: PreTrainedModel) -> tuple[float, float, list[list[float]]]:
    """Return seconds of all linear layers and experts by JIT-compiled and by torch's kernels, and each one's times.

    The head is left out.
    """
    layers: dict[tuple[Any, ...], list[nn.Linear]] = {}
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            layers.setdefault((*module.weight.shape, module.weight.dtype), []).append(module)
    totals, times = [0.0, 0.0], []
    for alike in layers.values():
        weight = alike[0].weight
        rows = max(1, min(weight.shape[0], _WORK // (_ROWS * weight.shape[1])))
        part = weight[:rows]
        ours = native_linear(part, None)
        if ours is None:
            continue
        x = torch.randn((1, _ROWS, weight.shape[1]), generator=_generator(), device="cpu").to(weight.dtype)
        kernels: list[Linear] = [ours, partial(functional.linear, weight=part)]
        for which, linear in enumerate(kernels):
            found = _seconds(partial(linear, x))
            times.append(found)
            totals[which] += len(alike) * min(found) * weight.shape[0] / rows
    for experts in _experts_by_shape(model).values():
        for which, found in enumerate(_times_of_experts(experts[0])):
            times.append(found)
            totals[which] += len(experts) * min(found) * experts[0].num_experts / _EXPERTS
    return totals[0], totals[1], times


def _seconds(run: Callable[[], Any], repeats: int = _REPEATS) -> list[float]:
    """Return the seconds that a function takes, several times after a first one."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return found[1:]


def _experts_by_shape(model: nn.Module) -> dict[tuple[Any, ...], list[Any]]:
    """Return the layers of experts that have JIT-compiled kernels, by the shapes of their weights."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for module in experts_of(model):
        if runs_through_interface(module) and native_experts(module) is not None:
            shapes = (tuple(tensor.shape) for tensor in module.parameters(recurse=False))
            found.setdefault((*shapes, next(module.parameters()).dtype), []).append(module)
    return found


def _times_of_experts(layer: Any) -> tuple[list[float], list[float]]:
    """Return the seconds of some experts by JIT-compiled and by torch's kernels, each with its share of the tokens."""
    few = copy(layer)  # with some of the experts, which stay where they are
    few._parameters = {name: tensor.detach()[:_EXPERTS] for name, tensor in layer._parameters.items()}
    few.num_experts = len(few.down_proj)
    chosen_by_each = getattr(layer.config, "num_experts_per_tok", None) or 1
    tokens = max(1, _ROWS * chosen_by_each // layer.num_experts)
    chosen = torch.arange(few.num_experts, device="cpu").repeat(tokens)[:, None]
    columns = layer.down_proj.shape[2 if layer.is_transposed else 1]
    x = torch.randn((len(chosen), columns), generator=_generator(), device="cpu").to(layer.down_proj.dtype)
    weights = torch.ones(chosen.shape, dtype=x.dtype, device="cpu")
    ours = native_experts(few)
    assert ours is not None
    return _seconds(partial(ours, x, chosen, weights)), _seconds(partial(run_experts, few, x, chosen, weights))


def _keeps_bits(model: PreTrainedModel, batch_invariance: BatchInvariance) -> bool:
    """Tell whether a text has the same keys, values and logits if read at once, in parts or two tokens at a time."""
    passes = prompt_passes(model, batch_invariance)
    count = cut_to_table(model, _TOKENS, 1)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(0, vocabulary, (1, count), generator=_generator(), device="cpu")
    positions = torch.arange(count, device="cpu")[None]

    def read(*ends: int) -> tuple[torch.Tensor, list[Any]] | None:
        cache = _buffered_cache(model)
        at, logits = 0, None
        for end in (*ends, count):
            assert passes is not None
            logits = passes.read(cache, ids[:, at:end], positions[:, at:end])
            if logits is None:
                return None
            at = end
        assert logits is not None
        return logits, [part for layer in cache.layers for part in (layer.keys, layer.values)]

    whole = None if passes is None else read()
    parts = [] if whole is None else [read(2, 19), read(*range(2, 18, 2)), read(count - 1)]
    return whole is not None and all(
        found is not None
        and torch.equal(found[0], whole[0])
        and all(torch.equal(one, other) for one, other in zip(found[1], whole[1], strict=True))
        for found in parts
    )


def part_of_prompts(model: PreTrainedModel) -> int | None:
    """Return the length of the parts in which the model's own code reads prompts to the same bits after any cache.

    torch's kernels may round a token differently depending on how many are multiplied with it. Parts that begin at
    multiples of their length are multiplied alike in every call: whether that suffices here is tried, once per machine.

    Args:
        model: the target model.

    Returns:
        `PART`; `None` where bits differ, or the model's own code does not go on from recurrent states, or the model is
        not on the CPU.
    """
    if input_device(model).type != "cpu" or cut_to_table(model, 2 * PART, _REST) < 2 * PART:
        return None
    if has_states(model) and has_scans_of_its_own(model, 1):
        return None

    def measure() -> bool:
        with torch.inference_mode():
            return _parts_keep_bits(model)

    described = {"what": "bits of prompts in parts", **describe_model(model), "part": PART, "format": 2}
    return PART if cached_measurement(model, described, measure) is True else None


def _parts_keep_bits(model: PreTrainedModel) -> bool:
    """Tell whether two parts and a rest of a text have the same bits after a copy of the parts before.

    Where recurrent states go from one part to the next, the logits must also be those of a reading at once, apart from
    rounding, and each layer must continue from its state: some of transformers' begin each pass from an empty one.
    """
    count = 2 * PART + _REST
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(0, vocabulary, (1, count), generator=_generator(), device="cpu")
    positions = torch.arange(count, device="cpu")[None]

    recurrent: dict[int, Recurrent] = {}  # by number of tokens

    def note(cache: Cache, at: int) -> None:
        recurrent[at] = copied_states(cache)

    def read(begun: Start, end: int = count) -> tuple[torch.Tensor, States]:
        """Return the logits, and all keys and values; note recurrent states."""
        cache = new_cache(model)
        add_buffers(cache)
        begun.fill(cache)
        logits = read_in_parts(model, cache, ids[:, :end], positions[:, :end], PART, begun.count, note).logits
        states = whole_text(cache, end)
        assert logits is not None
        if states is None:
            raise ValueError("a layer does not hold the whole text")
        return logits, states

    def all_of(logits: torch.Tensor, states: States) -> list[torch.Tensor]:
        return [logits, *chain(*states), *(state for layer in recurrent[count] for state in layer.values())]

    def continues(begun: Start) -> bool:
        """Tell whether all states after a few tokens depend on those before them."""
        louder = [
            {name: state * _LOUDER if name.startswith("recurrent") else state for name, state in layer.items()}
            for layer in begun.recurrent
        ]
        end = begun.count + _FEW
        read(begun, end)
        states = recurrent[end]
        read(replace(begun, recurrent=louder), end)
        return not any(
            name.startswith("recurrent") and torch.equal(state, other[name])
            for layer, other in zip(states, recurrent[end], strict=True)
            for name, state in layer.items()
        )

    try:
        logits, states = read(Start())
        whole = all_of(logits, states)
        starts = [
            Start(at, [(keys[:, :, :at], values[:, :, :at]) for keys, values in states], recurrent[at])
            for at in (PART, 2 * PART)
        ]
        if has_states(model):
            apart = logits - _read_at_once(model, ids, positions)
            if not (apart.float().std() <= _MOST_APART * logits.float().std() and continues(starts[-1])):
                return False
        others = [all_of(*read(start)) for start in starts]
    except Exception:  # for example, a model without positions among its arguments
        return False
    return all(len(other) == len(whole) and all(map(torch.equal, whole, other)) for other in others)


def _read_at_once(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits of a text's last token `(1, 1, V)` by a single pass of the model's own code."""
    found: torch.Tensor = read_in_parts(model, new_cache(model), ids, positions, ids.shape[1]).logits
    return found


def _buffered_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache for captured passes."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    add_buffers(cache)
    return cache


def _generator() -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(0)
