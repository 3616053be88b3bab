"""Skip sets from a dynamic programme over hidden states (CLaSp, ACL 2025), sub-layer by sub-layer.

After each layer, for each number j of sub-layers skipped so far, one partial draft is retained: the one whose hidden
states have the greatest cosine similarity to the target's. A layer has four variants: whole, without its attention,
without its MLP, without both. (CLaSp decides on whole layers, from the last token; here every token of a text counts,
each attending to the target's keys and values for its prefix and to its own.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..config import SkipConfig
from ..decoding.verified_text import VerifiedText
from ..forward.structure.layouts import LayerLayout
from ..forward.structure.skip_mode import SkipMode
from ..forward.structure.sublayers import locate_sublayers
from ..tuning.acceptance import round_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["layerwise_skips"]


@dataclass(frozen=True)
class _PartialDraft:
    """Draft up to some layer: hidden states of shape `(N, H)`, and the sub-layers skipped."""

    hidden: torch.Tensor
    skipped: tuple[tuple[str, int], ...] = ()


class _StopError(Exception):
    """Signal that ends a forward pass after the layer of interest: the later ones are not needed."""


def layerwise_skips(model: PreTrainedModel, text: VerifiedText, most: int | None = None) -> list[SkipConfig]:
    """Return a skip set of each size, from a text of the target.

    Args:
        model: the target model.
        text: the target's text; its whole continuation is used.
        most: maximum number of skipped sub-layers; `None`: half of all.

    Returns:
        The skip set of one sub-layer, of two, …; sizes without a skip set are left out.
    """
    layout = locate_sublayers(model)
    if len({id(layer.module) for layer in layout.layers}) < len(layout.layers):
        raise ValueError(
            f"The layers of {type(model).__name__} hold several attentions each, so that they cannot be left out one "
            "by one: its skip set is searched by trials."
        )
    subs = sum((layer.attention is not None) + (layer.mlp is not None) for layer in layout.layers)
    most = subs // 2 if most is None else min(most, subs)
    run = _LayerRun(model, text)
    target = run.embedded()
    partial: dict[int, _PartialDraft] = {0: _PartialDraft(target)}
    with_attention = sum(layer.attention is not None for layer in layout.layers)
    for layer in layout.layers:
        variants: list[tuple[tuple[str, ...], Callable[[torch.Tensor], torch.Tensor]]] = []
        combinations: list[tuple[str, ...]] = [(), ("attention",), ("mlp",), ("attention", "mlp")]
        for left_out in combinations:
            if any(getattr(layer, kind) is None for kind in left_out):
                continue
            if "attention" in left_out and layer.index in layout.shares_kv:
                continue
            variants.append((left_out, run.way(layer, left_out)))
        outputs = {left_out: way(_stacked(partial)) for left_out, way in variants}
        target = run.way(layer, ())(target[None])[0]
        reached: dict[int, tuple[float, _PartialDraft]] = {}
        for place, (count, before) in enumerate(partial.items()):
            for left_out, hidden in outputs.items():
                total = count + len(left_out)
                if total > most:
                    continue
                skipped = (*before.skipped, *((kind, layer.index) for kind in left_out))
                if sum(kind == "attention" for kind, _ in skipped) >= with_attention:
                    continue
                similarity = float(torch.cosine_similarity(hidden[place].float(), target.float(), dim=-1).mean())
                if total not in reached or similarity > reached[total][0]:
                    reached[total] = similarity, _PartialDraft(hidden[place], skipped)
        partial = {count: best for count, (_, best) in sorted(reached.items())}
    return [
        SkipConfig(
            attention=[i for kind, i in p.skipped if kind == "attention"],
            mlp=[i for kind, i in p.skipped if kind == "mlp"],
        )
        for count, p in partial.items()
        if count
    ]


def _stacked(partial: dict[int, _PartialDraft]) -> torch.Tensor:
    return torch.stack([p.hidden for p in partial.values()])


class _LayerRun:
    """Runner of single layers on given hidden states, inside a forward pass of the model that provides other inputs."""

    def __init__(self, model: PreTrainedModel, text: VerifiedText) -> None:
        self.model = model
        self.text = text
        self.layout = locate_sublayers(model)

    def embedded(self) -> torch.Tensor:
        """Return the input of the first layer, of shape `(N, H)`."""
        captured: list[torch.Tensor] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            captured.append(args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()))))
            raise _StopError

        self._pass(1, [(self.layout.layers[0].module, forward)], SkipConfig())
        return captured[0][0]

    def way(self, layer: LayerLayout, left_out: tuple[str, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that maps hidden states `(J, N, H)` of J drafts through a layer without some sub-layers."""

        def run(hidden: torch.Tensor) -> torch.Tensor:
            drafts, tokens, width = hidden.shape
            captured: list[torch.Tensor] = []
            inside = hidden.reshape(1, drafts * tokens, width)

            def forward(*args: Any, **kwargs: Any) -> Any:
                if args:
                    args = (inside, *args[1:])
                else:
                    kwargs = {
                        **kwargs,
                        next(iter(kwargs)) if "hidden_states" not in kwargs else "hidden_states": inside,
                    }
                output = type(layer.module).forward(layer.module, *args, **kwargs)
                captured.append(output[0] if isinstance(output, tuple) else output)
                raise _StopError

            before = [other.bypass() for other in self.layout.layers[: layer.index]]
            skip = SkipConfig(
                attention=[layer.index] if "attention" in left_out else [],
                mlp=[layer.index] if "mlp" in left_out else [],
            )
            self._pass(drafts, [*before, (layer.module, forward)], skip)
            return captured[0].reshape(drafts, tokens, width)

        if left_out and layer.can_be_bypassed and len(left_out) == 2:
            return lambda hidden: hidden
        return run

    def _pass(self, drafts: int, patches: list[tuple[Any, Any]], skip: SkipConfig) -> None:
        tokens = len(self.text)
        index = torch.arange(tokens, device="cpu").repeat(drafts)
        inputs = round_inputs(self.model, self.text, torch.arange(drafts * tokens, device="cpu"), index, index)
        mode = SkipMode(self.model, skip, patches)
        try:
            with torch.no_grad(), mode:
                self.model(**inputs)
        except _StopError:
            pass
