"""Trials of captured passes before they are used."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache

from ...cache.buffered_layers import add_buffers
from ...cache.recurrent import PassState, PassStates, has_states, has_states_alone
from ...native.cache_table import ONE_TEXT
from ...native.codegen.compiler import why_not
from ...support.machine import cpu_name
from ...support.measurements import cached_measurement
from ...support.source_code import code_of, code_of_package
from ...support.versions import cache_argument
from ..eager.module_states import mode_of_states
from ..rounding import agree, moved_embeddings
from ..structure.adapters import adapters_in_use, numbers_of
from ..structure.positions import cut_to_table
from .cache_attention import CacheAttention
from .capture import CannotCapture
from .fx_graph import Program
from .state_steps import states_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compare_with_model", "try_out"]

_TIMES, _MOST = 4, 0.35
"""Limits in half precision: logits of other kernels may differ by so many times the effect of another rounding of the
embeddings, and by so many standard deviations, as a root mean square."""

_CACHED = 9
"""Tokens before a pass that is tried out."""

Attending = Callable[[Cache, int], CacheAttention | None]
"""`(cache, tokens)` → the attention of a pass over so many tokens; `None` where the cache is of another kind."""


def compare_with_model(
    model: PreTrainedModel, program: Program, digest: str, attending: Attending, knows_windows: bool
) -> None:
    """Compare a pass on a small cache with the model's own: a wrong capture must never decide a token.

    Two of three texts have to agree: in half precision there are tokens whose logits change with every rounding. What
    was found is stored for later processes, with the weights, the pass, and the code of the model and of this package.

    Args:
        model: the target model.
        program: the pass.
        digest: digest of its operations, as captured; that of another length will do where one capture gives both.
        attending: begins the attention of the pass.
        knows_windows: whether this attention knows about sliding windows.

    Raises:
        CannotCapture: the logits differ by more than rounding.
    """

    def compare() -> bool:
        agreeing = [_agrees(model, program, attending, knows_windows, seed) for seed in range(2)]
        if agreeing[0] != agreeing[1]:
            agreeing.append(_agrees(model, program, attending, knows_windows, 2))
        if sum(agreeing) < 2:
            raise CannotCapture("the captured pass gives different logits from the model's")
        return True

    if adapters_in_use(model):  # `numbers_of` reads a few of their numbers, too few for this
        compare()
    else:
        cached_measurement(model, _described(model, digest), compare)


def _described(model: PreTrainedModel, digest: str) -> dict[str, Any]:
    """Describe all that the comparison depends on."""
    return {
        "what": "captured pass",
        "machine": [cpu_name(), torch.get_num_threads(), torch.__version__, why_not() is None],
        "transformers": transformers.__version__,
        "attention": getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None),
        "model": type(model).__name__,
        "config": hashlib.sha256(str(model.config.to_dict()).encode()).hexdigest(),
        "code": code_of(model),
        "weights": numbers_of(model),
        "dtype": str(model.dtype),
        "pass": digest,
        "compared by": code_of_package(),
    }


def _agrees(model: PreTrainedModel, program: Program, attending: Attending, knows_windows: bool, seed: int) -> bool:
    """Tell whether a pass over random tokens gives the model's logits, but for rounding."""
    length = program.length
    with torch.inference_mode(), mode_of_states(model) or nullcontext():
        vocabulary = model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator(device="cpu").manual_seed(seed)
        cached = cut_to_table(model, _CACHED, length)
        text = torch.randint(0, vocabulary, (1, cached + length), generator=generator, device="cpu")
        prompt, ids = text[:, :cached], text[:, cached:]
        positions = torch.arange(cached, cached + length, device="cpu")[None]
        # Layers with a window have none here, unless the attention knows about windows; states need their layers.
        needs_layers = knows_windows or has_states(model)
        own = DynamicCache(config=model.config.get_text_config(decoder=True)) if needs_layers else DynamicCache()
        name = cache_argument(model)
        model(input_ids=prompt, use_cache=True, **{name: own})
        buffered = copy.deepcopy(own)
        add_buffers(buffered)
        before = copy.deepcopy(own)
        expected = _logits(model, own, positions, input_ids=ids)
        attention = attending(buffered, length)
        if attention is None:
            raise CannotCapture("its cache has layers of an unsupported kind")
        got = program.run(ids, positions, attention).float()
        if got.shape != expected.shape:
            return False
        if agree(got, expected, model.dtype):
            return True
        if model.dtype == torch.float32:
            return False
        other = _TIMES * _sensitivity(model, ids, positions, before, expected)
        difference, spread = got - expected, expected.std()
        return bool(difference.norm() <= min(other, _MOST * spread * expected.numel() ** 0.5))


def _sensitivity(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, cache: Cache, expected: torch.Tensor
) -> torch.Tensor:
    """Return how far logits move where the embeddings are rounded differently."""
    moved = moved_embeddings(model, ids)
    logits = _logits(model, cache, positions, inputs_embeds=moved)
    distance: torch.Tensor = (logits - expected).norm()
    return distance


def _logits(model: PreTrainedModel, cache: Cache, positions: torch.Tensor, **tokens: torch.Tensor) -> torch.Tensor:
    """Return logits by the model's own code, of states token by token, as they are decoded.

    Some layers of states compute another function of several tokens.
    """
    (name, given), at = next(iter(tokens.items())), cache_argument(model)
    each = 1 if has_states(model) else given.shape[1]
    places: Any = torch.split(positions, each, dim=1)
    if has_states_alone(model):
        places = [None] * len(places)
    found = [
        model(**{name: part, at: cache}, **({} if place is None else {"position_ids": place}), use_cache=True).logits
        for part, place in zip(torch.split(given, each, dim=1), places, strict=True)
    ]
    return torch.cat(found, dim=1).float()


def try_out(model: PreTrainedModel, program: Program) -> None:
    """Run a draft's pass without a cache. Its tokens are verified later; that it can be run must be known before.

    A model may combine what a draft computes in bfloat16 with weights of its own in a way that torch refuses.

    Args:
        model: the target model.
        program: the draft's pass.
    """
    forms = states_of(model) if has_states(model) else {}
    layers: list[list[PassState]] = [[] for _ in range(1 + max((place.layer for place in forms), default=0))]
    for place in sorted(forms):
        layers[place.layer].append(PassState(*[forms[place].clone()] * 2))

    class Nothing:
        states, texts, count = PassStates(layers), ONE_TEXT, program.length

        def slots(self, length: int) -> torch.Tensor:
            return torch.arange(cached, cached + length, device="cpu")

        def attend(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
        ) -> torch.Tensor:
            return query.new_zeros((1, program.length, query.shape[1], value.shape[3]), dtype=model.dtype)

        def attend_latents(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
            return torch.zeros_like(query, dtype=model.dtype)

    ids = torch.zeros((1, program.length), dtype=torch.long, device="cpu")
    with torch.inference_mode():
        cached = cut_to_table(model, _CACHED, program.length)
        program.run(ids, torch.arange(cached, cached + program.length, device="cpu")[None], Nothing())
