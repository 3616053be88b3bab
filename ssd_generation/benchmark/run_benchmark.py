"""Benchmark: all methods on all prompts, with a fixed number of new tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..config import SelfSpeculativeConfig
from ..decoding.ends import stored_end_tokens
from ..generation import enable_self_speculative
from ..harness.methods import PLAIN, Method, make_methods
from ..harness.peer_methods import PeerModel
from ..harness.peers import PEERS, Peer
from ..harness.results import RunFolder, finished_calls
from ..harness.run import Caller, Observer, RunSettings, SideBySide, TimedCall
from ..harness.texts import Prompt, Question, digest, encode_prompt, questions_of

__all__ = ["BenchmarkSettings", "benchmark_arguments", "run_benchmark"]


@dataclass(frozen=True)
class BenchmarkSettings(RunSettings):
    """Settings of a benchmark, see `RunSettings`.

    Args:
        new_tokens: new tokens of every call; end of sequence is off. ≥ 2, so that there is a step after the prompt's
            pass.
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
    """Return the arguments that identify a run, for `RunFolder`.

    Args:
        settings: settings of the run.
        prompts: prompts of the run.
        config: config of the methods that need one.
        **about: the model and everything else that the results depend on.
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
        prompts: prompts to run, at least one.
        folder: results folder, entered (`with`).
        settings: settings of the run.
        config: config of the methods that need one.
        assistant: model of the method "assistant".
        observe: callback with the progress, before each call.
        peers: the models of other runtimes' methods, by the method's name, see `gguf_models` and `openvino_models`.

    Returns:
        The summary, as in summary.json.

    Raises:
        ValueError: no prompts, or a config that does not fit.
        KeyboardInterrupt: re-raised; finished calls are stored, with a summary of them.
    """
    if not prompts:
        raise ValueError("There are no prompts to run.")

    methods = make_methods(settings.methods, enable_self_speculative(model), config, settings.seed, peers)
    with contextlib.ExitStack() as stack:
        runtimes = _runtimes(methods, model.dtype)
        for runtime in runtimes.values():
            stack.enter_context(contextlib.closing(runtime))
        caller = Caller(model, assistant, runtimes)
        return Benchmark(tokenizer, prompts, caller, methods, folder, settings, observe).run()


class Benchmark(SideBySide):
    """Benchmark run, see `SideBySide`.

    A later turn follows plain decoding's answers to the earlier ones, the same for all methods. Without a chat template
    there are no turns, and only the first question is asked.

    Args:
        tokenizer: the model's tokenizer.
        prompts: prompts to run, at least one.
        caller, methods: as in `SideBySide`.
        folder, settings, observe: as in `SideBySide`.
    """

    settings: BenchmarkSettings

    def __init__(
        self,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        caller: Caller,
        methods: Sequence[Method],
        folder: RunFolder,
        settings: BenchmarkSettings,
        observe: Observer | None,
    ) -> None:
        has_turns = settings.chat_template and getattr(tokenizer, "chat_template", None) is not None
        self.questions: Sequence[Question] = questions_of(prompts, has_turns)
        self.tokenizer = tokenizer
        super().__init__(caller, methods, self.questions, folder, settings, observe)

    def inputs(self, index: int) -> dict[str, torch.Tensor]:
        question = self.questions[index]
        answers = self._answers(question)
        if missing := next((name for name, _ in question.earlier if name not in answers), None):
            raise ValueError(f"{question.id} follows an answer to {missing}, and plain decoding gave none.")
        before = [(text, answers[name]) for name, text in question.earlier]
        encoded = encode_prompt(self.tokenizer, question.text, self.settings.chat_template, before)
        return {key: value.to(self.model.device) for key, value in encoded.items()}

    def _answers(self, question: Question) -> dict[str, str]:
        """Return plain decoding's first answers to the earlier turns."""
        names = {name for name, _ in question.earlier}
        if not names:
            return {}
        return {
            row["prompt"]: self._text(row["token_ids"])
            for row in finished_calls(self.rows)
            if row["prompt"] in names and row["method"] == PLAIN and row["repeat"] == 0
        }

    def _text(self, ids: Sequence[int]) -> str:
        """Return an answer up to its end token, where the call did not end."""
        ends = stored_end_tokens(self.model.generation_config)
        length = next((number for number, token in enumerate(ids) if token in ends), len(ids))
        return str(self.tokenizer.decode(ids[:length], skip_special_tokens=True))

    def noted(self, index: int, call: TimedCall) -> dict[str, Any]:
        question = self.questions[index]
        return {"conversation": question.conversation} if question.conversation != question.id else {}


def _runtimes(methods: Sequence[Method], dtype: torch.dtype) -> dict[str, Peer]:
    """Return the other runtimes that the methods need, by name, for a model of this dtype."""
    needed = {method.request["peer"].peer for method in methods if "peer" in method.request}
    return {name: kind(dtype) for name, kind in PEERS.items() if name in needed}
