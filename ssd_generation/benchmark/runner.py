"""The benchmark: all methods on all prompts, with a fixed number of new tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..config import SelfSpeculativeConfig
from ..generation import enable_self_speculative
from ..harness.methods import Method, make_methods
from ..harness.peer_methods import PeerModel
from ..harness.peers import PEERS, Peer
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
    peers: Mapping[str, PeerModel] | None = None,
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
        peers: the models of other runtimes' methods, by the method's name, see `gguf_models` and `openvino_models`.

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

    methods = make_methods(settings.methods, enable_self_speculative(model), config, settings.seed, peers)
    with contextlib.ExitStack() as stack:
        runtimes = _runtimes(methods, model.dtype)
        for runtime in runtimes.values():
            stack.enter_context(contextlib.closing(runtime))
        caller = Caller(model, assistant, runtimes)
        return Benchmark(caller, methods, prompts, folder, settings, observe).run()


def _runtimes(methods: Sequence[Method], dtype: torch.dtype) -> dict[str, Peer]:
    """Return the other runtimes that methods need, by name, for a model of that dtype."""
    needed = {method.request["peer"].peer for method in methods if "peer" in method.request}
    return {name: kind(dtype) for name, kind in PEERS.items() if name in needed}
