"""Time of programs that call `generate` themselves, with a model as it is and with one that drafts in every call.

    python -m tests.lab.doors [--model FOLDER] [--dtype bfloat16] [--new-tokens 64] [--repeats 2]
                                              [--only NAME ...] [--json]

Both decode the same questions greedily, interleaved; the command of each program is in docs/integrations.md or
docs/serving.md. A program that is not installed is left out, with a line that says so. `tests.lab.rollouts` times
trainers, and `tests.lab.constrained` more of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessorList, pipeline

from ssd_generation.generation import enable_self_speculative
from ssd_generation.harness.results import Timings, spread
from ssd_generation.harness.run import interleaved
from ssd_generation.models import load_model
from ssd_generation.serving import export_model, find_model

from .constrained import LIBRARIES, REQUESTS
from .program import Program, conditions
from .served import Server, served, ssd_serve, streamed, transformers_serve
from .side_by_side import greedy_options, with_range
from .tables import as_markdown

__all__ = ["DOORS", "Door", "Place", "measure_doors"]

QUESTIONS = ("Why is the sky blue?", "Write a haiku about the sea.", "List the planets of the solar system.", "2 + 2 =")
"""Questions that a door answers in each call."""

Call = Callable[[], list[str]]
"""Function that has a program answer all questions, and returns the answers."""


@dataclass(frozen=True)
class Place:
    """Model, folder and options with which a door is opened.

    Attributes:
        model: the model, plain or drafting.
        tokenizer: its tokenizer.
        folder: folder of the model; of a drafting one, a folder that `ssd export` writes.
        drafts: whether it drafts.
        dtype: data type of the weights, as an option's value.
        new_tokens: most new tokens of an answer.
    """

    model: Any
    tokenizer: Any
    folder: str
    drafts: bool
    dtype: str
    new_tokens: int

    @property
    def options(self) -> dict[str, Any]:
        """Options of a greedy call of `generate`."""
        return {"max_new_tokens": self.new_tokens, "do_sample": False}


@dataclass(frozen=True)
class Door:
    """Program that calls `generate`.

    Attributes:
        name: name in the table.
        opened: function that prepares the program; its context yields the call that is timed.
        needs: packages that it imports.
    """

    name: str
    opened: Callable[[Place], AbstractContextManager[Call]]
    needs: tuple[str, ...] = ()


def _generate(model: Any, place: Place, question: str, **options: Any) -> str:
    inputs = place.tokenizer(question, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, **place.options, **options)
    return str(place.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@contextlib.contextmanager
def _direct(place: Place) -> Iterator[Call]:
    yield lambda: [_generate(place.model, place, question) for question in QUESTIONS]


@contextlib.contextmanager
def _exported(place: Place) -> Iterator[Call]:
    model = AutoModelForCausalLM.from_pretrained(place.folder, dtype=place.dtype, trust_remote_code=place.drafts)
    yield lambda: [_generate(model, place, question) for question in QUESTIONS]


@contextlib.contextmanager
def _piped(place: Place) -> Iterator[Call]:
    pipe: Any = pipeline("text-generation", place.model, tokenizer=place.tokenizer, **place.options)
    yield lambda: [str(pipe(question, return_full_text=False)[0]["generated_text"]) for question in QUESTIONS]


@contextlib.contextmanager
def _adapted(place: Place) -> Iterator[Call]:
    peft = import_module("peft")
    model = AutoModelForCausalLM.from_pretrained(place.folder, dtype=place.dtype)
    if place.drafts:
        enable_self_speculative(model, always=True)
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    yield lambda: [_generate(adapted, place, question) for question in QUESTIONS]


@contextlib.contextmanager
def _lm_eval(place: Place) -> Iterator[Call]:
    instance = import_module("lm_eval.api.instance").Instance
    lm = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=place.model, tokenizer=place.tokenizer, batch_size=2, device=str(place.model.device)
    )

    def call() -> list[str]:
        asked = {"until": ["\n\n\n"], "max_gen_toks": place.new_tokens, "do_sample": False}
        requests = [
            instance("generate_until", {}, (question, dict(asked)), number) for number, question in enumerate(QUESTIONS)
        ]
        return list(lm.generate_until(requests, disable_tqdm=True))

    yield call


@contextlib.contextmanager
def _lighteval(place: Place) -> Iterator[Call]:
    module = import_module("lighteval.models.transformers.transformers_model")
    parameters = import_module("lighteval.models.model_input").GenerationParameters
    requests = import_module("lighteval.tasks.requests")
    with tempfile.TemporaryDirectory() as cache:
        number = 0

        def call() -> list[str]:
            nonlocal number
            number += 1  # answers are stored by the model's name
            config = module.TransformersModelConfig(
                model_name=place.folder,
                device=str(place.model.device),
                batch_size=2,
                max_length=512,
                cache_dir=f"{cache}/{number}",
                generation_parameters=parameters(temperature=0.0, max_new_tokens=place.new_tokens),
            )
            docs = [
                requests.Doc(
                    query=question,
                    choices=[""],
                    gold_index=0,
                    id=str(place_of),
                    task_name="questions|0",
                    generation_size=place.new_tokens,
                    stop_sequences=[],
                    sampling_methods=[requests.SamplingMethod.GENERATIVE],
                )
                for place_of, question in enumerate(QUESTIONS)
            ]
            lm = module.TransformersModel.from_model(place.model, config)
            return [str(response.text[0]) for response in lm.greedy_until(docs)]

        yield call


@contextlib.contextmanager
def _langchain(place: Place) -> Iterator[Call]:
    langchain: Any = import_module("langchain_huggingface")
    pipe = pipeline("text-generation", place.model, tokenizer=place.tokenizer, **place.options)
    llm = langchain.HuggingFacePipeline(pipeline=pipe, pipeline_kwargs=place.options)
    yield lambda: ["".join(llm.stream(question)) for question in QUESTIONS]


@contextlib.contextmanager
def _smolagents(place: Place) -> Iterator[Call]:
    smolagents: Any = import_module("smolagents")
    llm = smolagents.TransformersModel(
        place.folder, device_map="cpu", torch_dtype=place.dtype, max_new_tokens=place.new_tokens, do_sample=False
    )
    if place.drafts:
        enable_self_speculative(llm.model, always=True)

    def ask(question: str) -> str:
        said = [smolagents.ChatMessage(role="user", content=[{"type": "text", "text": question}])]
        return str(llm.generate(said).content)

    yield lambda: [ask(question) for question in QUESTIONS]


def _constrained(library: str) -> Callable[[Place], AbstractContextManager[Call]]:
    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[Call]:
        vocabulary = int(place.model.get_input_embeddings().weight.shape[0])
        # Answers are as long as their schema has them.
        options = {**greedy_options(4 * place.new_tokens), "eos_token_id": place.tokenizer.eos_token_id}
        makers = [
            (question, LIBRARIES[library](place.tokenizer, vocabulary, json.dumps(schema)))
            for question, schema in REQUESTS
        ]

        def answer(question: str, make: Callable[[], Any]) -> str:
            inputs = place.tokenizer(question, return_tensors="pt").to(place.model.device)
            ids = place.model.generate(**inputs, **options, logits_processor=LogitsProcessorList([make()]))
            return str(place.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

        yield lambda: [answer(question, make) for question, make in makers]

    return opened


def _served(ours: bool) -> Callable[[Place], AbstractContextManager[Call]]:
    """Return the door of a server, which two clients stream from: `ssd serve`, or transformers' of an export."""

    @contextlib.contextmanager
    def opened(place: Place) -> Iterator[Call]:
        is_ours = ours and place.drafts
        command = ssd_serve(place.folder) if is_ours else transformers_serve(place.folder, place.drafts)
        name = Path(place.folder).name if is_ours else place.folder
        with served(command, place.dtype) as server:
            yield lambda: _by_two_clients(server, name, place.new_tokens)

    return opened


def _by_two_clients(server: Server, name: str, new_tokens: int) -> list[str]:
    answers: dict[str, str] = {}

    def ask(questions: Sequence[str]) -> None:
        for question in questions:
            answers[question] = streamed(server, name, question, new_tokens)

    clients = [threading.Thread(target=ask, args=(QUESTIONS[number::2],)) for number in range(2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return [answers[question] for question in QUESTIONS]


DOORS = (
    Door("`model.generate`", _direct),
    Door("a folder of `ssd export`, `from_pretrained`", _exported),
    Door("`pipeline`", _piped),
    Door("a LoRA adapter (PEFT)", _adapted, ("peft",)),
    Door("lm-eval, two texts at once", _lm_eval, ("lm_eval",)),
    Door("lighteval, two texts at once", _lighteval, ("lighteval",)),
    Door("LangChain, `stream`", _langchain, ("langchain_huggingface",)),
    Door("smolagents", _smolagents, ("smolagents",)),
    Door("JSON by a schema, xgrammar", _constrained("xgrammar"), ("xgrammar",)),
    Door("JSON by a schema, outlines", _constrained("outlines"), ("outlines",)),
    Door("`ssd serve`, two streaming clients", _served(True), ("uvicorn", "fastapi", "openai")),
    Door("`transformers serve` of an export, two clients", _served(False), ("uvicorn", "fastapi", "openai")),
)
"""All doors."""


def measure_doors(
    model: str, dtype: str, new_tokens: int, repeats: int, doors: Sequence[Door] = DOORS
) -> Iterator[dict[str, Any]]:
    """Time each door with a plain and with a drafting model, in turn.

    Args:
        model: folder of a model, or `demo`.
        dtype: data type of its weights.
        new_tokens: most new tokens of an answer.
        repeats: timed calls of each, after one to warm up.
        doors: doors to open.

    Yields:
        For each door: its `door`, `plain` and `drafting` seconds (medians), the `speedup` (as `spread` gives it), and
        the numbers of answers and of those that are the `same`; or why it was not tried (`untried`).
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = find_model(model)
        exported = Path(scratch) / "drafting"
        export_model(source, exported, "auto", link=True)
        places = []
        for drafts in (False, True):
            loaded, tokenizer = load_model(str(source.folder), dtype=dtype)
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            loaded.generation_config.pad_token_id = tokenizer.pad_token_id
            if drafts:
                enable_self_speculative(loaded, always=True)
            folder = str(exported if drafts else source.folder)
            places.append(Place(loaded, tokenizer, folder, drafts, dtype, new_tokens))
        for door in doors:
            missing = [name for name in door.needs if find_spec(name) is None]
            if missing:
                yield {"door": door.name, "untried": f"{', '.join(missing)} is not installed"}
                continue
            yield {"door": door.name, **_timed(door, places, repeats)}


def _timed(door: Door, places: Sequence[Place], repeats: int) -> dict[str, Any]:
    timings = Timings(("plain", "drafting"), "plain")
    answers: dict[str, list[str]] = {}
    with contextlib.ExitStack() as stack:
        calls = {
            name: stack.enter_context(door.opened(place)) for name, place in zip(timings.by_method, places, strict=True)
        }
        for turn in interleaved(list(calls), repeats):
            began = time.perf_counter()
            answers[turn.method] = calls[turn.method]()
            seconds = time.perf_counter() - began
            if not turn.is_warm_up:
                timings.add(turn.method, 1, seconds)
    return {
        "plain": statistics.median(timings.seconds("plain")),
        "drafting": statistics.median(timings.seconds("drafting")),
        "speedup": spread(timings.ratios("drafting")),
        "answers": len(answers["plain"]),
        "same": sum(one == other for one, other in zip(answers["plain"], answers["drafting"], strict=True)),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("doors", __doc__)
    program.add_model(dtype="bfloat16")
    program.add_counts(new_tokens=64, repeats=2)
    program.add_argument("--only", nargs="+", metavar="NAME", help="doors whose name contains one of these")
    program.add_json()
    arguments = program.parsed(words)
    doors = [door for door in DOORS if any(word in door.name for word in arguments.only or [door.name])]
    if not doors:
        program.error(f"--only names no program; choose from: {'; '.join(door.name for door in DOORS)}")
    _hush()
    found = []
    for row in measure_doors(arguments.model, arguments.dtype, arguments.new_tokens, arguments.repeats, doors):
        print(row, file=sys.stderr, flush=True)
        found.append(row)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{conditions(arguments)}\n")
    print("\n".join(_table(found)))


def _hush() -> None:
    """Silence what the programs print about themselves."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _table(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in found:
        if "untried" in row:
            lines.append([row["door"], row["untried"], "–", "–", "–"])
            continue
        seconds = [f"{row[name]:.2f}" for name in ("plain", "drafting")]
        lines.append([row["door"], *seconds, with_range(row["speedup"]), f"{row['same']} of {row['answers']}"])
    return as_markdown(["door", "plain, s", "drafting, s", "times plain", "answers that are the same"], lines)


if __name__ == "__main__":
    main()
