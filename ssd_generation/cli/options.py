"""What the options mean: layers, configs, devices, prompts."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..config import SelfSpeculativeConfig, SkipConfig

DEMO = "demo"
DEMO_PRESET = "smollm2-135m-instruct"
AUTO = "auto"

WHAT_TO_DRAFT_WITH = "What to draft with"
ConfigOption = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help="A JSON file, a folder that holds one, a Hub id, or a preset (`ssd presets`). Default: the one that comes "
        "with the demo model, or is stored with the model.",
        rich_help_panel=WHAT_TO_DRAFT_WITH,
    ),
]
ConfigToCompareOption = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help="Of `config`, `skip` and `paper`: a JSON file, a folder that holds one, a Hub id, or a preset (`ssd "
        "presets`). Default: the one that comes with the demo model.",
        rich_help_panel=WHAT_TO_DRAFT_WITH,
    ),
]
ConfigNameOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Which config, where the file holds one per model.",
        rich_help_panel=WHAT_TO_DRAFT_WITH,
    ),
]
SkipAttentionOption = Annotated[
    str | None,
    typer.Option(
        metavar="LAYERS",
        help="Layers whose attention the draft leaves out, counted from 0: `5,7,10-12`.",
        rich_help_panel=WHAT_TO_DRAFT_WITH,
    ),
]
SkipMlpOption = Annotated[
    str | None,
    typer.Option(metavar="LAYERS", help="The same for the MLPs.", rich_help_panel=WHAT_TO_DRAFT_WITH),
]
_MODEL_PANEL = "Model"
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, a .gguf file, or `demo`: SmolLM2-135M-Instruct.")
]
DtypeOption = Annotated[
    str, typer.Option(help="auto (as stored), float32, bfloat16, float16.", rich_help_panel=_MODEL_PANEL)
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, … Default: cuda if there is one.", rich_help_panel=_MODEL_PANEL),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        help="Spread the model over devices: auto, balanced, … (needs accelerate).", rich_help_panel=_MODEL_PANEL
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="CPU threads. Default: torch's.", rich_help_panel=_MODEL_PANEL),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A Hub id, a folder, a .gguf file, or `demo`: SmolLM2-135M-Instruct, fetched once (93 MB) and kept.",
        rich_help_panel=_MODEL_PANEL,
    ),
]
WHAT_TO_COMPARE = "What to compare"
MethodsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="With commas between them; plain decoding is always there (`ssd benchmark --help` lists them). Default: "
        "auto, config where there is one, paper where that skips something, prompt-lookup-10, assistant where there is "
        "one; in a benchmark also auto-free, plain-loop, prompt-lookup-2 and -3.",
        rich_help_panel=WHAT_TO_COMPARE,
    ),
]
AssistantOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="A small model of the same vocabulary, for `assistant`.", rich_help_panel=WHAT_TO_COMPARE
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Where the results go. Default: a new folder, named by the model and the time. A folder of an "
        "interrupted run: go on with it.",
        rich_help_panel="Results",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


# ----------------------------------------------------------------------------------------------------------------------
# layers


def parse_layers(option: str, text: str | None) -> list[int]:
    """Layer numbers from a list such as `5,7,10-12`.

    Args:
        option: name of the option, for the message.
        text: the list; `None` or empty for no layers.

    Raises:
        ValueError: not such a list.
    """
    layers: list[int] = []
    for part in re.split(r"[,\s]+", (text or "").strip(" ,")):
        match = re.fullmatch(r"(\d+)(?:[-–](\d+))?", part)
        if part and match is None:
            raise ValueError(
                f"{option}: {part!r} is no layer. Write layer numbers, counted from 0, and ranges, with commas between "
                "them: 5,7,10-12."
            )
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"{option}: the range {part!r} runs backwards. Write {last}-{first}.")
            if last > 100_000:
                raise ValueError(f"{option}: no model has a layer {last}.")
            layers += range(first, last + 1)
    return layers


def describe_layers(layers: Sequence[int]) -> str:
    """The reverse of `parse_layers`, with runs of three and more as ranges."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown: list[str] = []
    for run in runs:
        shown += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(layer) for layer in run]
    return ", ".join(shown)


def describe_skip(skip: SkipConfig) -> str:
    """A skip set in words, such as "attention 5, 7, 10–12 and MLP 9"."""
    kinds = (("attention", skip.attention), ("MLP", skip.mlp))
    return " and ".join(f"{kind} {describe_layers(layers)}" for kind, layers in kinds if layers)


# ----------------------------------------------------------------------------------------------------------------------
# configs


def requested_config(
    config: str | None,
    config_name: str | None,
    skip_attention: str | None,
    skip_mlp: str | None,
    precision: str | None = None,
    lookup: bool | None = None,
) -> SelfSpeculativeConfig | None:
    """The config that the options name; `None` where they name none (`--no-lookup` alone names none).

    `precision` and `lookup` add to a config or a skip set, or replace what it says of them.

    Raises:
        ValueError, TypeError, FileNotFoundError: the options contradict one another, or the config cannot be read.
    """
    from ..config import PrecisionConfig, SelfSpeculativeConfig, SkipConfig

    parts: dict[str, Any] = {}
    if precision is not None:
        parts["precision"] = PrecisionConfig.named(precision)
    if config is not None:
        if skip_attention is not None or skip_mlp is not None:
            raise ValueError("--config and --skip-attention/--skip-mlp both say what to skip. Leave one of them out.")
        found = dataclasses.replace(SelfSpeculativeConfig.from_pretrained(config, name=config_name), **parts)
        return found if lookup is None else with_lookup(found, lookup)
    if config_name is not None:
        raise ValueError(f"--config-name {config_name} needs --config, the file that holds configs by name.")
    if skip_attention is None and skip_mlp is None and precision is None and not lookup:
        return None
    skip = SkipConfig(
        attention=parse_layers("--skip-attention", skip_attention), mlp=parse_layers("--skip-mlp", skip_mlp)
    )
    return SelfSpeculativeConfig(skip=skip, lookup=lookup, **parts)


def requested_methods(
    methods: str | None,
    config: SelfSpeculativeConfig | None,
    assistant: str | None,
    default: Callable[[SelfSpeculativeConfig | None, bool], tuple[str, ...]],
) -> tuple[str, ...]:
    """The methods of `--methods`, plain decoding among them; where it is not given, those of `default`.

    Raises:
        ValueError: a name that is none, or a method that needs a config or an assistant where there is none.
    """
    from ..harness.methods import check_methods

    if methods is None:
        return default(config, assistant is not None)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    return check_methods(names, config, assistant is not None)


def with_lookup(config: SelfSpeculativeConfig, lookup: bool) -> SelfSpeculativeConfig:
    """A config with prompt lookup (its own, where it has one), or without.

    Raises:
        ValueError: without prompt lookup the config has nothing to draft with.
    """
    if lookup:
        return config if config.lookup is not None else dataclasses.replace(config, lookup=True)  # type: ignore[arg-type]
    if config.lookup is not None and not config.skip and not config.precision:
        raise ValueError(
            "--no-lookup: this config drafts by prompt lookup alone, so nothing would be left to draft with. Leave it "
            "out, or add --precision or --skip-attention."
        )
    return dataclasses.replace(config, lookup=None)


def default_config(model_name: str, generation_config: Any) -> SelfSpeculativeConfig | None:
    """The skip set that goes with a model, if there is one: the demo model's, or what is stored with the model."""
    from ..config import SelfSpeculativeConfig

    if model_name == DEMO:
        return SelfSpeculativeConfig.preset(DEMO_PRESET)
    return stored_config(generation_config)


def stored_config(generation_config: Any) -> SelfSpeculativeConfig | None:
    """The config stored with a model (`enable_self_speculative(model, default=…)`); `None` for none and for "auto"."""
    from ..config import SelfSpeculativeConfig

    stored = getattr(generation_config, "self_speculative", None)
    if isinstance(stored, Mapping):
        return SelfSpeculativeConfig.from_dict(stored)
    if isinstance(stored, str) and stored != AUTO:
        return SelfSpeculativeConfig.from_pretrained(stored)
    return None


def with_drafting(
    config: SelfSpeculativeConfig | None, policy: str | None, draft_length: int | None
) -> SelfSpeculativeConfig:
    """A config (by default an empty one) with another draft-length policy or draft length, where one is given.

    Raises:
        ValueError: an unknown policy, or no such length.
    """
    from ..config import SelfSpeculativeConfig

    config = SelfSpeculativeConfig() if config is None else config
    changes: dict[str, Any] = {}
    if policy is not None:
        changes["policy"] = policy
    if draft_length is not None:
        changes["max_draft_length"] = draft_length
    if not changes:
        return config
    drafting = dataclasses.replace(config.drafting, **changes)
    # What never drafts has nothing to improve.
    return dataclasses.replace(config, drafting=drafting, adapt=config.adapt and drafting.policy != "none")


# ----------------------------------------------------------------------------------------------------------------------
# models and prompts


def default_folder(kind: str, model: str) -> Path:
    """Where results go unless asked otherwise: a new folder, named by the model and the time."""
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(model).name) or "model"
    return Path(f"{kind}-{name}-{datetime.now():%Y%m%d-%H%M%S}")


def set_threads(threads: int | None) -> None:
    """The number of CPU threads, where one was asked for."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def load(
    name: str, dtype: str, device: str | None, device_map: str | None, tensor_parallel: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model onto its device, with something to look at meanwhile.

    Raises:
        ValueError, FileNotFoundError, …: as `load_model`; an unknown device.
    """
    import os

    import torch

    from ..models import fetch_demo, load_model
    from .console import progress

    if device is not None and device_map is not None:
        raise ValueError("--device and --device-map both say where the model goes. Leave one of them out.")
    if tensor_parallel:
        if device is not None or device_map is not None:
            raise ValueError(
                "--tensor-parallel says where the model goes: over all processes. Leave --device and --device-map out."
            )
        return load_model(name, dtype=dtype, tp_plan="auto")
    where: torch.device | None = None
    if device_map is None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            where = torch.device(device)
            torch.empty(0, device=where)
        except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
            reason = str(error).splitlines()[0]
            raise ValueError(f"--device {device}: {reason} Write cpu, cuda, cuda:1, mps, …") from error
    if name == DEMO:
        fetch_demo()  # shows its own progress
    if name == DEMO or os.path.exists(os.path.expanduser(name)):
        with progress(f"Loading {name}"):
            model, tokenizer = load_model(name, dtype=dtype, device_map=device_map)
    else:
        # The Hub's own bars tell how far a download is; a spinner would come between them.
        model, tokenizer = load_model(name, dtype=dtype, device_map=device_map)
    return (model if where is None else model.to(where)), tokenizer


def read_prompt(prompt: str | None, default: str) -> str:
    """The prompt: as given, from stdin for `-`, or the default.

    Raises:
        ValueError: it is empty.
    """
    if prompt is None:
        return default
    if prompt == "-":
        prompt = sys.stdin.read().rstrip("\n")
        if not prompt.strip():
            raise ValueError("The prompt from stdin is empty.")
    if not prompt.strip():
        raise ValueError(
            "The prompt is empty. Give some text, `-` to read it from stdin, or leave it out for an example."
        )
    return prompt


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None, use_template: bool
) -> dict[str, torch.Tensor]:
    """The model's inputs: the prompt in the tokenizer's chat template, or as it is where there is none.

    Returns:
        `input_ids` and `attention_mask`, each of shape `(1, prompt_length)`.

    Raises:
        ValueError: `system` without a chat template, the template refuses, or nothing is left of the prompt.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if system is not None and not (has_template and use_template):
        missing = "--no-chat-template leaves it out" if has_template else "this model's tokenizer has none"
        raise ValueError(f"--system needs a chat template, but {missing}. Put it into the prompt itself.")
    from ..harness.prompts import encode_prompt

    try:
        return encode_prompt(tokenizer, prompt, use_template, system=system)
    except ValueError as error:
        instead = "Write another one"
        if has_template and use_template:
            instead = f"Write another one, or try {'without --system' if system is not None else '--no-chat-template'}"
        raise ValueError(f"{error} {instead}.") from error
