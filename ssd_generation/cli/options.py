"""Option groups that several sub-commands share, see `option_groups`; `configs` and `resolve_options` resolve them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

DEMO = "demo"
DEMO_PRESET = "smollm2-135m-instruct"
AUTO = "auto"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@dataclass(frozen=True)
class ModelOptions:
    """Model, its dtype, and its placement."""

    panel: ClassVar[str] = "Model"

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A Hub id, a folder, a .gguf file, or `demo`: SmolLM2-135M-Instruct, downloaded once (93 MB).",
        ),
    ] = DEMO
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16, float16.")] = "auto"
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … Default: cuda if there is one.")] = None
    device_map: Annotated[
        str | None, typer.Option(help="Spread the model over devices: auto, balanced, … (needs accelerate).")
    ] = None


MAX_SEED = 2**32 - 1
"""Largest seed that all random generators take."""


@dataclass(frozen=True)
class MeasuredModelOptions(ModelOptions):
    """Model options where speed is measured."""

    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU threads. Default: torch's.")] = None


@dataclass(frozen=True)
class ModelArgumentOptions(MeasuredModelOptions):
    """Model options where the model is the command's argument, without `--model`."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, a .gguf file, or `demo`: SmolLM2-135M-Instruct.")
    ] = DEMO


@dataclass(frozen=True)
class ConfigOptions:
    """Config, or a skip set instead."""

    panel: ClassVar[str] = "What to draft with"

    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A JSON file, a folder that holds one, a Hub id, or a preset (`ssd presets`). Default: the one that "
            "comes with the demo model, or is stored with the model.",
        ),
    ] = None
    config_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which config, where the file holds one per model.")
    ] = None
    skip_attention: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS", help="Layers whose attention the draft leaves out, counted from 0: `5,7,10-12`."
        ),
    ] = None
    skip_mlp: Annotated[str | None, typer.Option(metavar="LAYERS", help="The same for the MLPs.")] = None


@dataclass(frozen=True)
class ComparedConfigOptions(ConfigOptions):
    """Config options where the config is one of several methods."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="For the methods `config`, `skip` and `paper`: a JSON file, a folder that holds one, a Hub id, or a "
            "preset (`ssd presets`). Default: the one that comes with the demo model.",
        ),
    ] = None


@dataclass(frozen=True)
class MethodOptions:
    """Methods to compare."""

    panel: ClassVar[str] = "What to compare"

    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Names separated by commas (`ssd benchmark --help` lists them); plain decoding is always among them. "
            "Default: auto, config if there is one, paper if that config skips something, prompt-lookup-10, assistant "
            "if there is one; in a benchmark also auto-free, plain-loop, prompt-lookup-2 and -3, and those of --gguf.",
        ),
    ] = None
    assistant: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A small model of the same vocabulary, for the method `assistant`."),
    ] = None


@dataclass(frozen=True)
class ResultOptions:
    """Destination of a run's results."""

    panel: ClassVar[str] = "Results"

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Folder for the results. Default: a new one, named by the model and the time. The folder of an "
            "interrupted run: continue that run.",
        ),
    ] = None
    as_json: JsonOption = False
