"""Models, prompts and result folders that the options name."""

from __future__ import annotations

import os
import stat
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from .options import DEMO

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .options import ModelOptions


_WAITS = "Reading the prompt from stdin. To use another one, give it, or redirect stdin from /dev/null."


def default_folder(kind: str, model: str) -> Path:
    """Return the default folder for results: a new one, named by the command, the model and the time."""
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(model).name) or "model"
    return Path(f"{kind}-{name}-{datetime.now():%Y%m%d-%H%M%S}")


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads, where one is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def load(
    options: ModelOptions, name: str | None = None, tensor_parallel: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model onto its device, and show progress meanwhile.

    Args:
        options: options of the model, its dtype and its placement.
        name: another model to load instead, such as an assistant.
        tensor_parallel: whether to spread the model over all processes.

    Raises:
        ValueError, FileNotFoundError, …: as `load_model`; an unknown device, or contradictory options.
    """
    from ..models import fetch_demo, load_model
    from .console import progress

    name = options.model if name is None else name
    dtype, device_map = options.dtype, options.device_map
    if options.device is not None and device_map is not None:
        raise ValueError("--device and --device-map both say where the model goes. Leave one of them out.")
    if tensor_parallel:
        if options.device is not None or device_map is not None:
            raise ValueError(
                "--tensor-parallel says where the model goes: over all processes. Leave --device and --device-map out."
            )
        return load_model(name, dtype=dtype, tp_plan="auto")
    device = _device(options.device) if device_map is None else None
    if name == DEMO:
        fetch_demo()  # shows its own progress
    if name == DEMO or os.path.exists(os.path.expanduser(name)):
        with progress(f"Loading {name}"):
            model, tokenizer = load_model(name, dtype=dtype, device_map=device_map)
    else:
        # The Hub shows the progress of a download; a bar of ours would interfere with its own.
        model, tokenizer = load_model(name, dtype=dtype, device_map=device_map)
    return (model if device is None else model.to(device)), tokenizer


def _device(name: str | None) -> torch.device:
    """Return the device of `--device`, tried with an empty tensor; by default the GPU, if there is one."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name}: {reason}. Write cpu, cuda, cuda:1, mps, …") from error
    return device


def read_prompt(prompt: str | None) -> str | None:
    """Return the prompt: as given, or from stdin for `-`.

    Without a prompt, what is piped in or redirected from a file is the prompt; `None` if that is empty.

    Raises:
        ValueError: the prompt is empty, or not UTF-8.
    """
    from .console import said_after_a_while

    if prompt is None:
        if not _is_redirected():
            return None
        with said_after_a_while(_WAITS):
            prompt = _read_stdin()
        if not prompt.strip():
            return None
    elif prompt == "-":
        prompt = _read_stdin()
        if not prompt.strip():
            raise ValueError("The prompt from stdin is empty.")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes that the system could not decode
        raise ValueError("The prompt is not UTF-8. Convert it, or check the locale of the terminal.")
    if not prompt.strip():
        raise ValueError(
            "The prompt is empty. Give some text, `-` to read it from stdin, or leave it out for an example."
        )
    return prompt


def _read_stdin() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"The prompt from stdin is not UTF-8: {error.reason} at byte {error.start}.") from error


def _is_redirected() -> bool:
    """Tell whether stdin is a pipe or a file: not a terminal, a null device, or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None, use_template: bool
) -> dict[str, torch.Tensor]:
    """Encode the prompt in the tokenizer's chat template, or as it is where there is none or it is not wanted.

    Returns:
        `input_ids` and `attention_mask`, each of shape `(1, prompt_length)`.

    Raises:
        ValueError: `system` without a chat template, a template that refuses the prompt, or a prompt without tokens.
    """
    from ..harness.texts import encode_prompt

    has_template = getattr(tokenizer, "chat_template", None) is not None
    if system is not None and not (has_template and use_template):
        missing = "--no-chat-template leaves it out" if has_template else "this model's tokenizer has none"
        raise ValueError(f"--system needs a chat template, but {missing}. Put it into the prompt itself.")
    try:
        return encode_prompt(tokenizer, prompt, use_template, system=system)
    except ValueError as error:
        instead = "Write another one"
        if has_template and use_template:
            instead = f"Write another one, or try {'without --system' if system is not None else '--no-chat-template'}"
        raise ValueError(f"{error} {instead}.") from error
