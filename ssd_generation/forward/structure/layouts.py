"""Layout of a model's decoder layers: their attention and MLP sub-layers, and the stubs by which these are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from ...config import SkipConfig

__all__ = ["DecoderLayout", "Kind", "LayerLayout", "Stub", "SubLayer", "names_of", "parts_of"]

Kind = Literal["attention", "mlp"]
Stub = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class SubLayer:
    """One attention or MLP sub-layer of one decoder layer.

    Attributes:
        kind: `"attention"` or `"mlp"`.
        layer: index of the decoder layer.
        name: attribute name inside the layer (`"self_attn"`, `"fc1 … fc2"`).
        modules: the modules that make up the sub-layer; the last one gives its output.
        private_norms: norms that serve this sub-layer only, so that they can be left out with it.
        output_length: `None` where the sub-layer returns a tensor, else the length of the tuple it returns.
        residual_index: position of the argument that is the residual, where the sub-layer adds it itself, else `None`.
        alongside: what each of the first of `modules` returns, as `output_length` says it. These run next to the
            others, and their outputs are added like that of the last one (another mixer of the layer, shared experts).
    """

    kind: Kind
    layer: int
    name: str
    modules: tuple[nn.Module, ...]
    private_norms: tuple[nn.Module, ...]
    output_length: int | None
    residual_index: int | None
    alongside: tuple[int | None, ...] = ()

    def of_modules(self, others: Mapping[int, nn.Module]) -> SubLayer:
        """Return the same sub-layer of another model, whose modules `others` gives by the id of those here."""
        modules, norms = (tuple(others[id(m)] for m in held) for held in (self.modules, self.private_norms))
        return replace(self, modules=modules, private_norms=norms)

    def num_parameters(self) -> int:
        """Count the parameters of the sub-layer, its private norms included."""
        seen = {id(p): p.numel() for m in (*self.modules, *self.private_norms) for p in m.parameters()}
        return sum(seen.values())

    def stubs(self) -> Iterator[tuple[nn.Module, Stub]]:
        """Yield the `(module, forward)` pairs that leave the sub-layer out: it adds 0 to the residual stream."""
        parts = len(self.alongside)
        for module, length in zip(self.modules, self.alongside, strict=False):
            yield module, _contribution_stub(length, None)
        for module in (*self.modules[parts:-1], *self.private_norms):
            yield module, _identity
        yield self.modules[-1], _contribution_stub(self.output_length, self.residual_index)


@dataclass(frozen=True, eq=False)
class LayerLayout:
    """One decoder layer: its sub-layers and what it returns.

    Attributes:
        module: the decoder layer.
        index: its position.
        attention: its attention sub-layer, or `None`.
        mlp: its MLP sub-layer, or `None`.
        output_length: `None` where the layer returns a tensor, else the length of the tuple.
        can_be_bypassed: whether leaving out both sub-layers leaves nothing of the layer. False where the layer
            normalises the residual stream itself (post-norm), which then stays in the draft.
        refusals: reasons why sub-layers that were found cannot be skipped. They are not among the layer's.
    """

    module: nn.Module
    index: int
    attention: SubLayer | None
    mlp: SubLayer | None
    output_length: int | None
    can_be_bypassed: bool
    refusals: Mapping[Kind, str] = field(default_factory=dict)

    def of_modules(self, others: Mapping[int, nn.Module]) -> LayerLayout:
        """Return the same layer of another model, as in `SubLayer.of_modules`."""
        attention, mlp = (None if sub is None else sub.of_modules(others) for sub in (self.attention, self.mlp))
        return replace(self, module=others[id(self.module)], attention=attention, mlp=mlp)

    def bypass(self) -> tuple[nn.Module, Stub]:
        """Return the `(module, forward)` pair that leaves the whole layer out: it passes its input on."""
        return self.module, _passthrough(self.output_length)


@dataclass(frozen=True, eq=False)
class DecoderLayout:
    """The decoder layers of a model, and which of their sub-layers can be skipped.

    Attributes:
        layers: in their order; empty where nothing can be skipped.
        num_parameters: parameters of the model.
        shares_kv: layers whose keys and values other layers read: their attention cannot be skipped.
        refusal: why no sub-layer at all can be skipped; `None`: some can.
        depth: number of decoder layers by the model's config.
        ran: whether the model's pass over a token, which finds the sub-layers, succeeded.
        without_keys: layers of which the cache holds states alone, or nothing.
    """

    layers: tuple[LayerLayout, ...]
    num_parameters: int
    shares_kv: frozenset[int]
    refusal: str | None = None
    depth: int = 0
    ran: bool = True
    without_keys: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.layers) or self.depth

    def is_current(self) -> bool:
        """Tell whether the model still consists of the modules that this layout names."""
        for layer in self.layers:
            for sub in (layer.attention, layer.mlp):
                if sub is not None and any(m not in parts_of(layer.module).values() for m in sub.modules):
                    return False
        return True

    def sublayer(self, kind: Kind, layer: int) -> SubLayer:
        """Return the sub-layer `kind` of layer `layer`.

        Raises:
            ValueError: the layer does not exist, has no such sub-layer, or other layers depend on it; or nothing can be
                skipped in this model.
        """
        if self.refusal is not None:
            raise ValueError(
                f"{self.refusal} Leave the skip set out: prompt lookup and low-bit copies (`precision`) need none."
            )
        if not 0 <= layer < len(self.layers):
            raise ValueError(
                f"The skip set names {kind} {layer}, but this model has layers 0 to {len(self.layers) - 1}. "
                "Use a config that was made for this model."
            )
        layout = self.layers[layer]
        sub = layout.attention if kind == "attention" else layout.mlp
        if sub is None and kind in layout.refusals:
            raise ValueError(f"{layout.refusals[kind]} Leave {kind} {layer} out of the skip set.")
        if sub is None:
            raise ValueError(
                f"Layer {layer} ({type(layout.module).__name__}) has no {kind} sub-layer that can be found: it "
                f"consists of {names_of(layout.module)}. Leave {kind} {layer} out of the skip set."
            )
        if kind == "attention" and layer in self.shares_kv:
            raise ValueError(
                f"The attention of layer {layer} stores keys and values that other layers read: it cannot be skipped. "
                f"Take {layer} out of the skip set's attention."
            )
        return sub

    def stubs(self, skip: SkipConfig) -> list[tuple[nn.Module, Stub]]:
        """Return the `(module, forward)` pairs that put the model in skip mode.

        A layer that loses both sub-layers is bypassed whole, norms and additions included.

        Raises:
            ValueError: a sub-layer of `skip` cannot be skipped, or all attention is.
        """
        attention, mlp = set(skip.attention), set(skip.mlp)
        # Checked before anything is built, so that the message names the first bad entry.
        chosen = [self.sublayer("attention", i) for i in skip.attention] + [self.sublayer("mlp", i) for i in skip.mlp]
        found = {layer.index for layer in self.layers if layer.attention is not None}
        kept = {layer.index for layer in self.layers if "attention" in layer.refusals}
        with_attention = (found | kept) - self.without_keys or found | kept
        if with_attention and with_attention <= attention:
            raise ValueError(
                f"The skip set leaves out all {len(with_attention)} attention sub-layers: the draft would not see the "
                "context. Keep at least one."
            )
        bypassed = {i for i in attention & mlp if self.layers[i].can_be_bypassed}
        pairs: list[tuple[nn.Module, Stub]] = [self.layers[i].bypass() for i in sorted(bypassed)]
        for sub in chosen:
            if sub.layer not in bypassed:
                pairs.extend(sub.stubs())
        return pairs

    def skipped_parameters(self, skip: SkipConfig) -> int:
        """Count the parameters that a draft with this skip set does not read."""
        subs = [self.sublayer("attention", i) for i in skip.attention] + [self.sublayer("mlp", i) for i in skip.mlp]
        return sum(sub.num_parameters() for sub in subs)


def parts_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a layer consists of, by name; a list of modules is replaced by its entries."""
    parts: dict[str, nn.Module] = {}
    for name, module in layer.named_children():
        if isinstance(module, nn.ModuleList):
            parts.update({f"{name}.{place}": entry for place, entry in enumerate(module)})
        else:
            parts[name] = module
    return parts


def names_of(module: nn.Module) -> str:
    """Return the names and classes of a module's sub-modules, for messages."""
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children()) or "no sub-modules"


# ----------------------------------------------------------------------------------------------------------------------
# the stubs


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if args:
        return args[0]  # type: ignore[no-any-return]
    states: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))
    return states


def _identity(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _hidden_states(args, kwargs)


def _passthrough(output_length: int | None) -> Stub:
    """Make the `forward` of a decoder layer that is left out whole."""
    if output_length is None:
        return _identity
    rest = (None,) * (output_length - 1)

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (_hidden_states(args, kwargs), *rest)

    return forward


def _contribution_stub(output_length: int | None, residual_index: int | None) -> Stub:
    """Make the `forward` of a sub-layer that adds nothing to the residual stream.

    It returns fresh zeros each time, since some layers add to the result in place (falcon), or the residual alone where
    the sub-layer is the one to add it.
    """
    rest = () if output_length is None else (None,) * (output_length - 1)

    def contribution(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if residual_index is None:
            return torch.zeros_like(_hidden_states(args, kwargs))
        if residual_index == 0:
            return _hidden_states(args, kwargs)
        return kwargs["residual"] if "residual" in kwargs else args[residual_index]  # type: ignore[no-any-return]

    if output_length is None:
        return lambda *args, **kwargs: contribution(args, kwargs)
    return lambda *args, **kwargs: (contribution(args, kwargs), *rest)
