"""`ssd inspect`: what a model is made of, and what a draft would leave out of it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DEMO, ConfigNameOption, ConfigOption, JsonOption, SkipAttentionOption, SkipMlpOption

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import SkipConfig
    from ..forward.sublayers import DecoderLayout, SubLayer

HELP = """List a model's layers and sub-layers, and what a config would leave out.

Only the model's description is read, not its weights: this works for models that would not fit into memory.

[bold]Examples[/bold]

  ssd inspect demo
  ssd inspect Qwen/Qwen2.5-7B-Instruct --skip-attention 12-20 --skip-mlp 15
  ssd inspect meta-llama/Llama-2-70b-hf --config llama-2-70b
"""


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Hub id, a folder, a .gguf file, or `demo`."),
    ] = DEMO,
    config: ConfigOption = None,
    config_name: ConfigNameOption = None,
    skip_attention: SkipAttentionOption = None,
    skip_mlp: SkipMlpOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the layers of a model."""
    from .console import out, print_json, quiet_libraries
    from .options import default_config, requested_config

    chosen = requested_config(config, config_name, skip_attention, skip_mlp)
    elsewhere = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet_libraries(), elsewhere:
        from ..config import SkipConfig

        source, gguf_file = _source(model)
        skeleton, layout = _skeleton(model, source, gguf_file)
        if chosen is None:
            chosen = default_config(model, _stored_generation_config(source))
        model_type = skeleton.config.get_text_config(decoder=True).model_type
        if chosen is not None:
            chosen.validate_for(num_layers=len(layout), model_type=model_type)
            layout.stubs(chosen.skip)  # raises where a sub-layer cannot be skipped
        skip = chosen.skip if chosen is not None else SkipConfig()
        document = _describe(skeleton, layout, skip)

    document = {"model": model, "model_type": model_type, **document}
    if as_json:
        print_json(document)
    else:
        out().print(_view(document, has_config=chosen is not None))


# ----------------------------------------------------------------------------------------------------------------------
# the model without its weights


def _source(name: str) -> tuple[str, str | None]:
    """`(folder or Hub id, GGUF file in it)`."""
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
    """The model without weights, and its layout; with its weights, where that does not work."""
    from ..forward.sublayers import locate_sublayers
    from .console import progress
    from .options import load

    if not os.path.isfile(os.path.join(source, "adapter_config.json")):
        with progress(f"Reading {name}"):
            found = _without_weights(_read_config(name, source, gguf_file))
        if found is not None:
            return found
    model, _ = load(name, dtype="auto", device=None, device_map=None)
    return model, locate_sublayers(model)


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
            f"{name!r} is a {config.model_type} model, which is no causal language model in transformers, so it cannot "
            "draft for itself."
        )
    return config


def _without_weights(config: Any) -> tuple[PreTrainedModel, DecoderLayout] | None:
    """The model made of fake tensors, which take no memory; `None` where an operator has no fake version."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    from ..forward.sublayers import locate_sublayers

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            # The fake version of the grouped products in mixtures of experts knows nothing but bfloat16.
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            return model, locate_sublayers(model)
    except ValueError:
        raise  # the model cannot be skipped in, and the message says why
    except Exception:
        return None
    finally:
        logger.setLevel(level)


def _stored_generation_config(source: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# figures


def _describe(model: PreTrainedModel, layout: DecoderLayout, skip: SkipConfig) -> dict[str, Any]:
    """All that is shown, as plain JSON types."""
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

    layers: list[dict[str, Any]] = [
        {"layer": layer.index, "attention": sublayer(layer.attention), "mlp": sublayer(layer.mlp)}
        for layer in layout.layers
    ]
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
    skipped_parameters = layout.skipped_parameters(skip)
    return {
        "class": type(model).__name__,
        "layers": layers,
        "parameters": totals,
        "head_is_the_embedding": tied,
        "skip": skip.to_dict(),
        "skipped_sublayers": len(skip),
        "sublayers": sum(layer[kind] is not None for layer in layers for kind in ("attention", "mlp")),
        "skipped_parameters": skipped_parameters,
        "skipped_share": skipped_parameters / max(layout.num_parameters, 1),
    }


def _span(model: PreTrainedModel, sub: SubLayer) -> tuple[str, int | None]:
    """What an attention sees: "full", "sliding" or "chunked", and how many tokens."""
    # As transformers' own caches read a config.
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


def _view(document: dict[str, Any], has_config: bool) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    from ..config import SkipConfig
    from .console import styled
    from .options import describe_skip

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("layer", justify="right", no_wrap=True)
    for kind in ("attention", "MLP"):
        table.add_column(kind)
        table.add_column("parameters", justify="right", no_wrap=True)
        if has_config:
            table.add_column("draft", no_wrap=True)
    for layer in document["layers"]:
        cells: list[Any] = [styled(str(layer["layer"]))]
        for kind in ("attention", "mlp"):
            cells += _cells(layer[kind], has_config)
        table.add_row(*cells)

    totals, all_parameters = document["parameters"], document["parameters"]["all"]
    summary = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    summary.add_column(no_wrap=True)
    summary.add_column(justify="right", no_wrap=True)
    summary.add_column(justify="right", no_wrap=True, style="dim")
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
            summary.add_row(name, value, "")
        else:
            summary.add_row(
                name, _count(value), f"{value / max(all_parameters, 1):.1%}", style="bold" if name == "all" else None
            )

    title = styled(
        (document["model"], "bold"),
        f"\n{document['class']}, {len(document['layers'])} layers, {_count(all_parameters)} parameters",
    )
    parts: list[Any] = [title, styled(), table, styled(), summary, styled()]
    if has_config:
        skip = SkipConfig.from_dict(document["skip"])
        parts.append(
            styled(
                f"The draft leaves out {document['skipped_sublayers']} of {document['sublayers']} sub-layers: "
                f"{describe_skip(skip) or 'none'}. That is {_count(document['skipped_parameters'])} parameters, "
                f"{document['skipped_share']:.1%} of all."
            )
        )
    else:
        parts.append(
            styled(("--config or --skip-attention 5,7-9 --skip-mlp 6 shows what a draft would leave out.", "dim"))
        )
    return Group(*parts)


def _cells(sub: dict[str, Any] | None, has_config: bool) -> list[Any]:
    from .console import styled

    if sub is None:
        return [styled(("none", "dim")), "–", *([""] if has_config else [])]
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
    """A number of parameters, to three digits."""
    size = float(number)
    for unit in ("", " k", " M"):
        if size < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g} B"
