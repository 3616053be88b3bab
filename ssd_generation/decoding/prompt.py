"""Prompt pass of the target, and the rows made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.buffered_layers import add_buffers, trim_windows
from ..cache.recurrent import Checkpoint, has_begun, knows_its_length, slots_of
from ..forward.context import Context
from ..forward.eager.module_states import module_states
from ..forward.eager.prompt_mode import prompt_mode
from ..forward.eager.prompt_parts import read_prompt_in_parts, read_rows_in_parts
from ..forward.forward import Forward
from ..forward.structure.positions import most_positions
from ..support.padding import padding_at_left
from ..support.versions import CACHE, cache_argument
from .batch_rows import Rows
from .choice import IMPOSSIBLE, Choice
from .loop_request import LoopRequest
from .outputs import StepOutputs
from .processors import Processors
from .repeated_prompts import RepeatedPrompts
from .rotary import RotarySwitch

__all__ = ["read_prompt", "starts_of_prompts"]

_PLAIN = frozenset(("attention_mask", "position_ids", "input_ids", "cache_position"))
"""Tensors among a model's arguments that a captured pass handles itself or does not need."""


def read_prompt(
    forward: Forward,
    request: LoopRequest,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    outputs: StepOutputs,
    choice: Choice,
) -> Rows:
    """Run the target over the prompt.

    Args:
        forward: the target's passes.
        request: request of `generate`.
        input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts, padded at the left.
        model_kwargs: the model's keyword arguments as `generate` prepared them, with the cache.
        outputs: records the outputs of the pass for the first tokens.
        choice: rule that picks tokens from scores.

    Returns:
        The rows, each with the first token after its prompt.
    """
    model, batch = forward.model, input_ids.shape[0]
    model_kwargs.pop("tokenizer", None)
    cache, config = model_kwargs.get(cache_argument(model)), request.generation_config
    starts = starts_of_prompts(input_ids, model_kwargs, config)
    prompts, repeated = _Prompts(input_ids, model_kwargs, starts, in_rows=batch > 1), None
    if starts is not None and module_states(model) is None:
        repeated = RepeatedPrompts.of(input_ids, starts, cache, config)
    if repeated is None:
        answer = _read(forward, config, prompts)
    else:
        answer = repeated.repeat(_read(forward, config, prompts.only(repeated.first)), cache)
    limits = request.limits(most_positions(model))
    context = _context(forward, model_kwargs, answer, input_ids.shape[1], limits.max_length)
    processors = Processors(request.processors, choice.draws)
    lockstep = request.lockstep or (batch > 1 and not processors.are_pure)
    rotary = RotarySwitch(model)
    rows = Rows(input_ids, context, processors, choice, limits, rotary, lockstep, request.cache_is_returned)
    raw, logits = outputs.float_logits(answer, 1, rows.device, processed=len(processors) > 0)
    scores = processors.at_step(input_ids, logits[:, 0].contiguous())[:, None]
    outputs.add_prompt(answer, raw, scores)
    first = rows.choose(scores)
    known: list[list[int]] = first.tolist()
    if [IMPOSSIBLE] in known:
        choice.fail(scores[:, 0])
    rows.append(known, first)
    return rows


@dataclass(frozen=True)
class _Prompts:
    """Prompts to be read together.

    Attributes:
        ids (`torch.LongTensor` of shape `(B, n)`): the prompts, padded at the left.
        arguments: the model's keyword arguments, with the cache.
        starts: as `starts_of_prompts` returns it.
        in_rows: whether they are those of a batch, if only one: the cache holds no stored prefix then.
    """

    ids: torch.Tensor
    arguments: dict[str, Any]
    starts: list[int] | None
    in_rows: bool

    @property
    def is_single(self) -> bool:
        """True if they are a single text without padding."""
        return self.starts == [0] and not self.in_rows

    def only(self, rows: Sequence[int]) -> _Prompts:
        """Return some of the rows, with the same cache."""
        assert self.starts is not None
        which = torch.tensor(rows, device=self.ids.device)
        of_rows = {
            key: value[which] if isinstance(value, torch.Tensor) and value.shape == self.ids.shape else value
            for key, value in self.arguments.items()
        }
        return _Prompts(self.ids[which], of_rows, [self.starts[row] for row in rows], self.in_rows)


def _read(forward: Forward, config: GenerationConfig, prompts: _Prompts) -> Any:
    """Run the target over prompts, in the way that its plan has for them; return its outputs."""
    answer = _by_captured_passes(forward, prompts)
    if answer is None:
        answer = _in_parts(forward, prompts)
    if answer is None:
        batch, length = prompts.ids.shape
        new = length - slots_of(prompts.arguments.get(cache_argument(forward.model)))
        with prompt_mode(forward.model, batch * new, forward.plan.own_kernels):
            return forward.model._prefill(prompts.ids, config, prompts.arguments, is_first_iteration=True)
    return answer


def _by_captured_passes(forward: Forward, prompts: _Prompts) -> CausalLMOutputWithPast | None:
    """Read prompts with the kernels used for decoding; return the outputs, or `None` where these cannot read them."""
    cache, positions = prompts.arguments.get(cache_argument(forward.model)), prompts.arguments.get("position_ids")
    if not forward.plan.prompts or not isinstance(cache, Cache) or RotarySwitch(forward.model):
        return None
    ids, starts, past = prompts.ids, prompts.starts, slots_of(cache)
    longest = forward.plan.longest_prompt
    if starts is None or not (prompts.is_single or (past == 0 and positions is not None)):
        return None
    if longest is not None and ids.shape[1] > longest:  # padding counts, so that all rows are read in the same way
        return None
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    logits = forward.read_prompt(cache, ids[:, past:], positions[:, past:], None if prompts.is_single else starts)
    if logits is None:
        return None
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def _in_parts(forward: Forward, prompts: _Prompts) -> CausalLMOutputWithPast | None:
    """Read prompts in the plan's parts; return the outputs, or `None` where they consist of more than tokens."""
    part, cache = forward.plan.prompt_part, prompts.arguments.get(cache_argument(forward.model))
    if part is None or not isinstance(cache, Cache) or RotarySwitch(forward.model):
        return None
    is_filled = forward.prefixes is not None and forward.prefixes.filled > 0
    if not is_filled and (slots_of(cache) % part or (has_begun(cache) and not slots_of(cache))):
        return None
    ids, starts, positions = prompts.ids, prompts.starts, prompts.arguments.get("position_ids")
    if prompts.is_single:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return read_prompt_in_parts(forward.model, cache, ids, positions, part, forward.prefixes)
    if positions is None and not knows_its_length(cache):
        positions = torch.zeros_like(ids)  # without keys nothing depends on them
    if starts is None or positions is None or slots_of(cache):
        return None
    return read_rows_in_parts(forward.model, cache, ids, positions, starts, part, forward.prefixes)


def starts_of_prompts(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> list[int] | None:
    """Find the starts of prompts that consist of tokens, with padding on their left, and nothing else.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, prompt_length)`): the prompts.
        model_kwargs: the model's keyword arguments.
        config: generation config of the call.

    Returns:
        Column of each row's first token that is no padding; `None` where the prompts consist of more.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    others = [key for key, value in model_kwargs.items() if isinstance(value, torch.Tensor) and key not in _PLAIN]
    if others or config.prefill_chunk_size is not None:
        return None
    if positions is not None and positions.shape != input_ids.shape:
        return None
    if mask is None:
        return [0] * len(input_ids)
    return padding_at_left(mask) if mask.shape == input_ids.shape else None


def _context(forward: Forward, model_kwargs: dict[str, Any], answer: Any, prompt_length: int, limit: int) -> Context:
    """Return the context that the passes after the prompt continue."""
    model, name = forward.model, cache_argument(forward.model)
    shapes = {key: value.shape for key, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
    kwargs = model._update_model_kwargs_for_generation(answer, model_kwargs, is_encoder_decoder=False)
    cache = kwargs.pop(name)
    if (states := module_states(model)) is not None:
        states.take(cache)
    add_buffers(cache)  # a cache made without a config has had layers only since the prompt's pass
    trim_windows(cache)
    kwargs.pop("inputs_embeds", None)
    mask, positions = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
    length = slots_of(cache, otherwise=prompt_length)
    return Context(
        cache,
        length=length,
        mask=mask,
        positions=positions,
        columns=_columns_of(kwargs, shapes),
        arguments=kwargs,
        limit=limit,
        checkpoint=Checkpoint.of(cache, length),
    )


def _columns_of(kwargs: dict[str, Any], before: dict[str, torch.Size]) -> dict[str, tuple[torch.Tensor, int]]:
    """Remove from the model's arguments those with a column per token, which have grown by one for the next token.

    After the prompt only their last column is used.

    Args:
        kwargs: the arguments, as transformers has updated them after the prompt.
        before: shapes of the arguments before.

    Returns:
        By name, the column of the next token, which is that of any later token too, and the dimension of the tokens.
    """
    columns = {}
    for key, value in list(kwargs.items()):
        if not isinstance(value, torch.Tensor) or len(before.get(key, ())) != value.ndim:
            continue
        grown = [dim for dim in range(value.ndim) if value.shape[dim] != before[key][dim]]
        if len(grown) == 1 and value.shape[grown[0]] == before[key][grown[0]] + 1:
            columns[key] = (value.narrow(grown[0], -1, 1), grown[0])
        elif key.endswith("token_type_ids"):  # needed for the prompt's tokens alone
            columns[key] = (value.new_zeros((len(value), 1)), 1)
        else:
            continue
        del kwargs[key]
    return columns
