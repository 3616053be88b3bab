"""`ssd inspect`: the structure of a model, and what a draft would leave out of it."""

from __future__ import annotations

import logging
import os
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .option_groups import with_option_groups
from .options import DEMO, ConfigOptions, JsonOption, ModelOptions

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedModel

    from ..config import SelfSpeculativeConfig, SkipConfig
    from ..forward.structure.layouts import DecoderLayout, SubLayer

HELP = """List a model's layers and sub-layers, and what a config would leave out.

Only the model's description is read, not its weights: this works for models that would not fit into memory.

[bold]Examples[/bold]

  ssd inspect demo
  ssd inspect Qwen/Qwen2.5-7B-Instruct --skip-attention 12-20 --skip-mlp 15
  ssd inspect meta-llama/Llama-2-70b-hf --config llama-2-70b
"""


@with_option_groups
def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Hub id, a folder, a .gguf file, or `demo`."),
    ] = DEMO,
    *,
    draft: ConfigOptions,
    as_json: JsonOption = False,
) -> None:
    """List the layers of a model."""
    from .configs import requested_config
    from .console import at_work, out, print_json

    config = requested_config(draft)
    with at_work(as_json):
        document = _inspected(model, config)
    if as_json:
        print_json({key: value for key, value in document.items() if key != "has_config"})
    else:
        out().print(_view(document))


def _inspected(model: str, config: SelfSpeculativeConfig | None) -> dict[str, Any]:
    """Collect all that is shown of a model as plain JSON types; by default with the config that comes with it."""
    from ..config import SkipConfig
    from ..decoding.refusals import refuse_model
    from ..native.codegen.compiler import why_not
    from .configs import default_config

    source, gguf_file = _source(model)
    skeleton, layout = _skeleton(model, source, gguf_file)
    refuse_model(skeleton)
    if config is None:
        config = default_config(model, _stored_generation_config(source))
    model_type = skeleton.config.get_text_config(decoder=True).model_type
    if config is not None:
        config.validate_for(num_layers=len(layout), model_type=model_type)
        layout.stubs(config.skip)  # raises where a sub-layer cannot be skipped
    skip = SkipConfig() if config is None else config.skip
    about = {
        "model": model,
        "model_type": model_type,
        "has_config": config is not None,
        "kernels": {"native": why_not() is None, "reason": why_not()},
    }
    return {**about, **_describe(skeleton, layout, skip)}


# ----------------------------------------------------------------------------------------------------------------------
# the model without its weights


def _source(name: str) -> tuple[str, str | None]:
    """Return `(folder or Hub id, GGUF file in it)`."""
    if name == DEMO:
        from ..models import fetch_demo

        return str(fetch_demo()), None
    path = Path(os.path.expanduser(name))
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"There is no GGUF file {name!r}. Check the path.")
        return str(path.parent), path.name
    if path.is_file():
        raise ValueError(f"{name!r} is a file, but not a .gguf file. Give a folder, a Hub id or a GGUF file.")
    return (str(path) if path.is_dir() else name), None


def _skeleton(name: str, source: str, gguf_file: str | None) -> tuple[PreTrainedModel, DecoderLayout]:
    """Return the model without weights, and its layout; where that fails, the model with its weights."""
    from ..forward.structure.sublayers import layout_of
    from .console import progress
    from .resolve_options import load

    if not os.path.isfile(os.path.join(source, "adapter_config.json")):
        with progress(f"Reading {name}"):
            found = _without_weights(_read_config(name, source, gguf_file))
        if found is not None:
            return found
    model, _ = load(ModelOptions(model=name))
    return model, layout_of(model)


def _read_config(name: str, source: str, gguf_file: str | None) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, **({} if gguf_file is None else {"gguf_file": gguf_file}))
    except OSError as error:
        raise FileNotFoundError(
            f"Found no model {name!r}: {str(error).splitlines()[0]} Give a folder written by save_pretrained, a "
            "Hub id, a .gguf file or demo."
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{name!r} is a {config.model_type} model, which is not a causal language model in transformers, so it "
            "cannot draft for itself."
        )
    return config


def _without_weights(config: Any) -> tuple[PreTrainedModel, DecoderLayout] | None:
    """Build the model from fake tensors, which take no memory; `None` where an operator has no fake version."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    from ..forward.structure.sublayers import layout_of

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        # Built on the meta device, since fake tensors cannot be cast in place, which some constructors do.
        with torch.device("meta"):
            # The fake version of the grouped products in mixtures of experts supports bfloat16 only.
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _make_fake(model)
            layout = layout_of(model)
            return (model, layout) if layout.ran else None
    except ValueError:
        raise  # an encoder-decoder
    except Exception:
        return None
    finally:
        logger.setLevel(level)


def _make_fake(model: PreTrainedModel) -> None:
    """Replace each of a model's tensors by a fake one on the CPU; tied weights stay tied."""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                    is_weight = table is module._parameters
                    made[id(tensor)] = torch.nn.Parameter(fake, requires_grad=False) if is_weight else fake
                table[name] = made[id(tensor)]


def _stored_generation_config(source: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# figures


def _describe(model: PreTrainedModel, layout: DecoderLayout, skip: SkipConfig) -> dict[str, Any]:
    """Describe the layers and parameters, and which of them are skipped."""
    layers = _describe_layers(model, layout, skip)
    totals, tied = _count_parameters(model, layout, layers)
    skipped_parameters = layout.skipped_parameters(skip)
    return {
        "class": type(model).__name__,
        "depth": len(layout),
        "cannot_skip": layout.refusal,
        "layers": layers,
        "parameters": totals,
        "head_is_the_embedding": tied,
        "skip": skip.to_dict(),
        "skipped_sublayers": len(skip),
        "sublayers": sum(layer[kind] is not None for layer in layers for kind in ("attention", "mlp")),
        "skipped_parameters": skipped_parameters,
        "skipped_share": skipped_parameters / max(layout.num_parameters, 1),
        "copies": _describe_copies(model),
    }


def _describe_copies(model: PreTrainedModel) -> dict[str, int]:
    """Estimate the bytes of int4 copies, and of all that a draft holds in memory of an offloaded model."""
    from ..config import PrecisionConfig, SkipConfig
    from ..forward.copies.copied_layers import estimated_bytes
    from ..forward.copies.resident import resident_bytes

    int4 = PrecisionConfig.named("int4")
    return {
        "int4": estimated_bytes(model, SkipConfig(), int4),
        "offloaded": resident_bytes(model, SkipConfig(), int4),
    }


def _describe_layers(model: PreTrainedModel, layout: DecoderLayout, skip: SkipConfig) -> list[dict[str, Any]]:
    skipped = {"attention": set(skip.attention), "mlp": set(skip.mlp)}

    def sublayer(sub: SubLayer | None) -> dict[str, Any] | None:
        if sub is None:
            return None
        data: dict[str, Any] = {
            "name": sub.name,
            "class": type(sub.modules[-1]).__name__,
            "parameters": sub.num_parameters(),
            "skipped": sub.layer in skipped[sub.kind],
        }
        if sub.kind == "attention":
            data["span"], data["window"] = _span(model, sub)
            data["read_by_other_layers"] = sub.layer in layout.shares_kv
        return data

    return [
        {
            "layer": layer.index,
            "attention": sublayer(layer.attention),
            "mlp": sublayer(layer.mlp),
            "cannot_skip": dict(layer.refusals),
        }
        for layer in layout.layers
    ]


def _count_parameters(
    model: PreTrainedModel, layout: DecoderLayout, layers: list[dict[str, Any]]
) -> tuple[dict[str, int], bool]:
    """Count the parameters by part of the model, and tell whether the head is the embedding."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    embedded = sum(p.numel() for p in embedding.parameters())
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    totals: dict[str, int] = {
        "embedding": embedded,
        "attention": sum(layer["attention"]["parameters"] for layer in layers if layer["attention"]),
        "mlp": sum(layer["mlp"]["parameters"] for layer in layers if layer["mlp"]),
        "head": 0 if head is None or tied else sum(p.numel() for p in head.parameters()),
    }
    totals["other"] = layout.num_parameters - sum(totals.values())
    totals["all"] = layout.num_parameters
    return totals, tied


def _span(model: PreTrainedModel, sub: SubLayer) -> tuple[str, int | None]:
    """Return the span of an attention ("full", "sliding" or "chunked"), and its length in tokens unless full."""
    # The config is read as transformers' own caches read it.
    config = model.config.get_text_config(decoder=True)
    window = getattr(sub.modules[-1], "sliding_window", None) or getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is not None and sub.layer < len(types):
        span = str(types[sub.layer]).removesuffix("_attention")
    else:
        span = "sliding" if window else "chunked" if chunk else "full"
    return span, {"sliding": window, "chunked": chunk}.get(span)


# ----------------------------------------------------------------------------------------------------------------------
# the view


def _view(document: dict[str, Any]) -> Any:
    """Build the output: a title, the layers, the parameters, and what the draft leaves out."""
    from rich.console import Group

    from .console import styled

    title = styled(
        (document["model"], "bold"),
        f"\n{document['class']}, {document['depth']} layers, {_count(document['parameters']['all'])} parameters",
    )
    if document["cannot_skip"] is not None:
        reason = f"{document['cannot_skip']} It drafts by prompt lookup and from low-bit copies."
        return Group(title, styled(), styled(reason), *_copies(document), styled(), _kernels(document))
    tables: list[Any] = [styled(), _layer_table(document), *_kept(document), styled(), _totals_table(document)]
    return Group(title, *tables, *_copies(document), styled(), _kernels(document), styled(), _draft(document))


def _copies(document: dict[str, Any]) -> list[Text]:
    """Describe the memory of low-bit copies."""
    from ..support.display import byte_size
    from .console import styled

    found = document["copies"]
    if found is None or not found["int4"]:
        return []
    text = (
        f"Low-bit copies in int4 take {byte_size(found['int4'])}. Where weights are offloaded (accelerate), a draft "
        f"holds {byte_size(found['offloaded'])} of copies in memory and reads no offloaded weights."
    )
    return [styled(), styled(text)]


def _kept(document: dict[str, Any]) -> list[Text]:
    """Explain why sub-layers cannot be skipped: for each kind, the reason of the first."""
    from .console import styled

    reasons: dict[str, str] = {}
    for layer in document["layers"]:
        for kind, reason in layer["cannot_skip"].items():
            reasons.setdefault(kind, reason)
    return [styled(), *map(styled, reasons.values())] if reasons else []


def _kernels(document: dict[str, Any]) -> Text:
    """Describe the kernels that read the weights on this processor."""
    from .console import styled

    reason = document["kernels"]["reason"]
    if reason is None:
        return styled("Kernels on the CPU: JIT-compiled for this processor, next to torch's.")
    return styled(f"Kernels on the CPU: torch's alone. JIT-compiled ones are not available here: {reason}.")


def _layer_table(document: dict[str, Any]) -> Table:
    """Build the table of layers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from .console import styled

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("layer", justify="right", no_wrap=True)
    for kind in ("attention", "MLP"):
        table.add_column(kind)
        table.add_column("parameters", justify="right", no_wrap=True)
        if document["has_config"]:
            table.add_column("draft", no_wrap=True)
    # Neighbouring layers that are alike share a line.
    for _, alike in groupby(document["layers"], key=lambda layer: {**layer, "layer": None}):
        layer, *others = alike
        last = f"–{others[-1]['layer']}" if others else ""
        cells: list[Any] = [styled(f"{layer['layer']}{last}")]
        for kind in ("attention", "mlp"):
            cells += _cells(layer[kind], document["has_config"], stays=kind in layer["cannot_skip"])
        table.add_row(*cells)
    return table


def _totals_table(document: dict[str, Any]) -> Table:
    from rich.table import Table

    totals, all_parameters = document["parameters"], document["parameters"]["all"]
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="dim")
    rows = [
        ("embedding", totals["embedding"]),
        ("attention", totals["attention"]),
        ("MLP", totals["mlp"]),
        ("head", "the embedding" if document["head_is_the_embedding"] else totals["head"]),
        ("norms and others", totals["other"]),
        ("all", all_parameters),
    ]
    for name, value in rows:
        if isinstance(value, str):
            table.add_row(name, value, "")
        else:
            share = f"{value / max(all_parameters, 1):.1%}"
            table.add_row(name, _count(value), share, style="bold" if name == "all" else None)
    return table


def _draft(document: dict[str, Any]) -> Text:
    """Describe what the draft leaves out, in words."""
    from ..config import SkipConfig
    from .console import styled
    from .layer_lists import describe_skip

    if not document["has_config"]:
        return styled(("--config or --skip-attention 5,7-9 --skip-mlp 6 shows what a draft would leave out.", "dim"))
    skip = SkipConfig.from_dict(document["skip"])
    return styled(
        f"The draft leaves out {document['skipped_sublayers']} of {document['sublayers']} sub-layers: "
        f"{describe_skip(skip) or 'none'}. That is {_count(document['skipped_parameters'])} parameters, "
        f"{document['skipped_share']:.1%} of all."
    )


def _cells(sub: dict[str, Any] | None, has_config: bool, stays: bool = False) -> list[Any]:
    from .console import styled

    if sub is None:
        return [styled(("cannot be skipped" if stays else "none", "dim")), "–", *([""] if has_config else [])]
    name = sub["name"]
    if sub.get("span", "full") != "full":
        name += f", {sub['span']}" + (f" {sub['window']}" if sub["window"] else "")
    if sub.get("read_by_other_layers"):
        name += ", read by other layers"
    style = "strike dim" if sub["skipped"] else ""
    cells = [styled((name, style)), styled((_count(sub["parameters"]), style))]
    if has_config:
        cells.append(styled(("left out", "bold yellow") if sub["skipped"] else ("·", "dim")))
    return cells


def _count(number: int) -> str:
    """Format a number of parameters to three digits."""
    size = float(number)
    for unit in ("", " k", " M"):
        if size < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g} B"
