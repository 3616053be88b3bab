"""One timed `generate` call. Run as a program: a worker that makes such calls for a paired benchmark.

The worker is started with `PYTHONPATH` set to one of the two checkouts, which may be older than this file: so nothing
of the package is imported at the top, and below only what has been there from the start. It reads one JSON object per
line from stdin and answers each with one on stdout, until stdin ends.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["Caller", "TimedCall", "first_line"]

# Where an enabled model keeps what its draft-length policies and the refinement of its drafts have learnt.


def _learnt_entries(model: Any) -> tuple[dict[str, Any], str, str]:
    """Where a model's draft-length policies and refinements are kept, by config: the namespace and the two names."""
    try:
        from ssd_generation.support.model_state import state_of
    except ImportError:  # a checkout from before there was one
        return vars(model), "_speculation_policies", "_speculation_refinements"
    return vars(state_of(model)), "policies", "refinements"


@dataclass(frozen=True)
class TimedCall:
    """What one call did.

    Attributes:
        token_ids: the new tokens.
        seconds: wall-clock time of the whole `generate` call.
        prompt_seconds: of these, until the end of the model's first pass. In plain and self-speculative decoding that
            is the pass over the prompt alone; assisted decoding has drafted before it and checks the draft in it, and
            with the model's own first layers as assistant it is a pass of these.
        speculation: counts and times of self-speculative decoding, as `SpeculationStatistics.to_dict` gives them,
            with `drafted_by_depth`, `judged_by_depth` and `accepted_by_depth`; else `None`.
        assisted: of transformers' assisted decoding, `target_passes`, `drafted_tokens` and `accepted_tokens`, by the
            lengths of the model's passes; else `None`.
    """

    token_ids: list[int]
    seconds: float
    prompt_seconds: float
    speculation: dict[str, Any] | None
    assisted: dict[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class Caller:
    """Calls one model by several methods, each as if it were alone with the model.

    Every method has draft-length policies of its own, which go on learning from call to call, and finds the model's
    config as it was.

    Args:
        model: the target model, after `enable_self_speculative`.
        assistant: the model behind `"assistant_model": true` in a request, or `None`.
        peer: a `LlamaCpp` for requests with `"llama_cpp"`, or `None`.
    """

    def __init__(self, model: Any, assistant: Any = None, peer: Any = None) -> None:
        self.model = model
        self.assistant = assistant
        self.peer = peer
        self._learnt: dict[str, Any] = {}

    def call(
        self,
        method: str,
        request: Mapping[str, Any],
        inputs: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        seed: int | None = None,
    ) -> TimedCall:
        """Generate once.

        Args:
            method: whose policies to use.
            request: what this method adds to `generate`'s arguments; `"assistant_model": True` stands for the
                assistant, and one with `"llama_cpp"` goes to the peer.
            inputs: `input_ids` of shape `(1, prompt_length)`, and `attention_mask`.
            options: `generate`'s other arguments.
            seed: of torch's random state; `None` leaves it alone.

        Raises:
            Whatever `generate`, or the peer, raises.
        """
        if "llama_cpp" in request:
            called: TimedCall = self.peer.call(request["llama_cpp"], inputs["input_ids"], options["max_new_tokens"])
            return called
        model = self.model
        arguments = {**options, **self.arguments(request)}
        if seed is not None:
            torch.manual_seed(seed)
        on_cuda = model.device.type == "cuda"
        first_pass = 0.0

        # What early exit drafts with has fewer layers meanwhile.
        inner = getattr(model, model.base_model_prefix, model).config
        layers = getattr(inner, "num_hidden_layers", None)
        lengths: list[int] = []

        def note_pass(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
            nonlocal first_pass
            if not first_pass:
                if on_cuda:
                    torch.cuda.synchronize(model.device)
                first_pass = time.perf_counter() - started
            if not request:
                if handle is not None:
                    handle.remove()
            elif getattr(inner, "num_hidden_layers", None) == layers:
                ids = kwargs.get("input_ids", args[0] if args else None)
                lengths.append(0 if ids is None else ids.shape[1])

        # Passes of a model with a hook are not played back, so this library's calls go by its own clock.
        is_own = arguments.get("self_speculative") is not None
        handle = None if is_own else model.register_forward_hook(note_pass, with_kwargs=True)
        try:
            with self.alone(method):
                if on_cuda:
                    torch.cuda.synchronize(model.device)
                started = time.perf_counter()
                output = model.generate(**inputs, **arguments)
                # Reading the tokens back waits for the device.
                tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
                seconds = time.perf_counter() - started
                statistics = model.last_speculation
        finally:
            if handle is not None:
                handle.remove()
        speculation = None
        if statistics is not None:
            # All but the rounds.
            first_pass = seconds - (statistics.total_seconds - statistics.prompt_seconds)
            speculation = {
                **statistics.to_dict(),
                "drafted_by_depth": list(statistics.drafted_by_depth),
                "judged_by_depth": list(statistics.judged_by_depth),
                "accepted_by_depth": list(statistics.accepted_by_depth),
            }
        counts = None
        if request and not is_own and lengths:
            # Behind the prompt, each pass takes the last token that was kept, and what was drafted; it keeps some of
            # that and adds a token of its own.
            drafted = lengths[0] - inputs["input_ids"].shape[1] + sum(length - 1 for length in lengths[1:])
            accepted = min(max(len(tokens) - len(lengths), 0), max(drafted, 0))
            counts = {"target_passes": len(lengths), "drafted_tokens": max(drafted, 0), "accepted_tokens": accepted}
        return TimedCall(tokens, seconds, first_pass, speculation, counts)

    def arguments(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A request as arguments of `generate`."""
        arguments = dict(request)
        if arguments.get("assistant_model") is True:
            if self.assistant is None:
                raise ValueError("The method 'assistant' needs an assistant model.")
            arguments["assistant_model"] = self.assistant
        if isinstance(arguments.get("self_speculative"), Mapping):
            from ssd_generation.config import SelfSpeculativeConfig

            arguments["self_speculative"] = SelfSpeculativeConfig.from_dict(arguments["self_speculative"])
        return arguments

    def config_of(self, method: str) -> Any:
        """The config that this method last drafted by, also where it was left to the library; `None` for the others."""
        # The newest key of what its policies are kept under.
        _, policies, _ = _learnt_entries(self.model)
        return next(reversed(self._learnt.get(method, {}).get(policies, {})), None)

    @contextlib.contextmanager
    def alone(self, method: str, learn: bool = True) -> Iterator[None]:
        """The model as this method knows it.

        Args:
            method: whose policies to put in place.
            learn: whether they keep what they learn meanwhile.
        """
        state, *names = _learnt_entries(self.model)
        others = {name: state.pop(name) for name in names if name in state}
        known = self._learnt.get(method, {})
        state.update({name: {} for name in names} | (known if learn else copy.deepcopy(known)))
        self.model.last_speculation = None
        # transformers' early exit lowers the number of layers while it drafts and, if that fails, leaves it so.
        config = getattr(self.model, self.model.base_model_prefix, self.model).config
        layers = getattr(config, "num_hidden_layers", None)
        try:
            yield
        finally:
            if layers is not None:
                config.num_hidden_layers = layers
            learnt = {name: state.pop(name) for name in names}
            if learn:
                self._learnt[method] = learnt
            state.update(others)


def first_line(error: BaseException) -> str:
    """An error in one line: its kind and the beginning of its message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0][:400]}{'…' if len(lines[0]) > 400 else ''}"


# ----------------------------------------------------------------------------------------------------------------------
# the worker


class _Worker:
    """Answers requests; each method named `do_…` answers one kind."""

    def __init__(self) -> None:
        self.caller: Caller | None = None
        self.tokenizer: Any = None

    def do_load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from ssd_generation.generation import enable_self_speculative
        from ssd_generation.models import load_model

        if message.get("threads"):
            torch.set_num_threads(message["threads"])

        def load(name: str) -> tuple[Any, Any]:
            model, tokenizer = load_model(name, dtype=message["dtype"], device_map=message.get("device_map"))
            return (model if message.get("device_map") else model.to(message["device"])), tokenizer

        model, self.tokenizer = load(message["model"])
        assistant = load(message["assistant"])[0] if message.get("assistant") else None
        self.caller = Caller(enable_self_speculative(model), assistant)
        return {
            # Which of the two checkouts was taken.
            "package": os.path.dirname(os.path.abspath(str(sys.modules["ssd_generation"].__file__))),
            "pad_token_id": getattr(model.generation_config, "pad_token_id", None),
        }

    def do_prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Requests of the methods, tokens of the prompts and the environment: asked of this checkout's worker only."""
        from ssd_generation.config import SelfSpeculativeConfig
        from ssd_generation.harness.methods import make_methods, portable
        from ssd_generation.harness.results import run_environment
        from ssd_generation.harness.texts import encode_prompt

        assert self.caller is not None
        config = SelfSpeculativeConfig.from_dict(message["config"]) if message.get("config") else None
        methods = make_methods(message["methods"], self.caller.model, config, message["seed"])
        return {
            "requests": {method.name: portable(method.request) for method in methods},
            "input_ids": [
                encode_prompt(self.tokenizer, text, message["chat_template"])["input_ids"][0].tolist()
                for text in message["texts"]
            ],
            "environment": run_environment(self.caller.model),
        }

    def do_call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self.caller is not None
        ids = torch.tensor([message["input_ids"]], device=self.caller.model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return self.caller.call(
            message["method"], message["request"], inputs, message["options"], message.get("seed")
        ).to_dict()


def _serve() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = getattr(worker, f"do_{message['do']}")(message)
        except Exception as error:  # for the other side to judge
            answer = {"error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # The folder of this file comes first on the path; its modules are the package's, not top-level ones.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _serve()
