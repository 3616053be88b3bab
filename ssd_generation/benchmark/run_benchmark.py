"""The benchmark: all methods on all prompts, with a fixed number of new tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..config import SelfSpeculativeConfig
from ..generation import enable_self_speculative
from ..harness.llama_cpp import LlamaCpp
from ..harness.methods import make_methods
from ..harness.results import RunFolder
from ..harness.run import Caller, Observer, RunSettings, SideBySide
from ..harness.texts import Prompt, digest, encode_prompt

__all__ = ["BenchmarkSettings", "benchmark_arguments", "run_benchmark"]


@dataclass(frozen=True)
class BenchmarkSettings(RunSettings):
    """How the methods are run, see `RunSettings`.

    Args:
        new_tokens: of every call; end of sequence is off. ≥ 2, so that there is a step after the prompt's pass.
        chat_template: whether prompts go through the tokenizer's chat template, where it has one.

    Raises:
        ValueError: a value out of range.
    """

    new_tokens: int = 48
    chat_template: bool = True

    def __post_init__(self) -> None:
        self.check_least(new_tokens=2)
        super().__post_init__()

    def options(self, pad_token_id: int | None) -> dict[str, Any]:
        return {**super().options(pad_token_id), "max_new_tokens": self.new_tokens, "eos_token_id": None}


def benchmark_arguments(
    settings: BenchmarkSettings, prompts: Sequence[Prompt], config: SelfSpeculativeConfig | None, **about: Any
) -> dict[str, Any]:
    """What defines a run, for `RunFolder`.

    Args:
        settings: of the run.
        prompts: of the run.
        config: of the methods that need one.
        **about: the model and whatever else the results depend on.
    """
    return {
        "format_version": 1,
        **about,
        **asdict(settings),
        "methods": list(settings.methods),
        "prompts": {"count": len(prompts), "sha256": digest(prompts)},
        "config": None if config is None else config.to_dict(),
    }


def run_benchmark(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    folder: RunFolder,
    settings: BenchmarkSettings,
    *,
    config: SelfSpeculativeConfig | None = None,
    assistant: Any = None,
    observe: Observer | None = None,
    gguf: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Time all methods on all prompts, see `SideBySide`.

    Args:
        model: the target model; it is enabled.
        tokenizer: its tokenizer.
        prompts: at least one.
        folder: of the results, entered (`with`).
        settings: of the run.
        config: of the methods that need one.
        assistant: model of the method "assistant".
        observe: callback with the progress, before each call.
        gguf: the GGUF files of llama.cpp's methods, by the method's name, see `gguf_methods`.

    Returns:
        The summary, as in summary.json.

    Raises:
        ValueError: no prompts, or a config that does not fit.
        KeyboardInterrupt: passed on; finished calls are kept, with a summary of them.
    """
    if not prompts:
        raise ValueError("There are no prompts to run.")

    class Benchmark(SideBySide):
        def inputs(self, index: int) -> dict[str, torch.Tensor]:
            encoded = encode_prompt(tokenizer, prompts[index].text, settings.chat_template)
            return {key: value.to(self.model.device) for key, value in encoded.items()}

    with contextlib.closing(LlamaCpp()) as peer:
        caller = Caller(enable_self_speculative(model), assistant, peer if gguf else None)
        methods = make_methods(settings.methods, model, config, settings.seed, gguf)
        return Benchmark(caller, methods, prompts, folder, settings, observe).run()
