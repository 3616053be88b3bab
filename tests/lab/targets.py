"""One model in every form in which its weights may be held, quantised or with adapters, and in which ways each drafts.

    python -m tests.lab.targets --model FOLDER [--gguf FILE] [--only NAME ...]
                                               [--rows FOLDER] [-o docs/quantised.md]

Each form's text with `self_speculative=` is held against that of the same form without. A form whose library is not
installed is left out, and the page says so. Nothing is timed. It takes minutes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from ssd_generation.config import Costs, DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.forward.row_by_row import row_by_row
from ssd_generation.generation import enable_self_speculative, why_no_drafts
from ssd_generation.support.files import write_whole
from ssd_generation.support.machine import cpu_name
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE

from .program import Program
from .tables import WRONG, Notes, counted, judged, kept_rows, kind_of, short, versions

__all__ = ["COLUMNS", "TARGETS", "Row", "page", "try_target"]

COLUMNS = {
    "lookup": "lookup",
    "int8": "int8 copies",
    "int4": "int4 copies",
    "skipping": "skipping",
    "batch": "batch",
    "sampling": "sampling",
    "sampled batch": "sampled batch",
    "auto": '"auto"',
}
"""What is tried with each form, and the heading of its column."""

NEW_TOKENS = 64
_TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef",
    "Once upon a time there was",
)


@dataclass(frozen=True)
class Target:
    """A form of the model's weights.

    Attributes:
        name: what the table calls it.
        make: loads it from a folder, or a GGUF file.
        needs: packages that it takes.
        states: of a model with adapters: the names of its states, and what brings the model to each.
        reads_gguf: whether it is loaded from a GGUF file.
    """

    name: str
    make: Callable[[str], Any]
    needs: tuple[str, ...] = ()
    states: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    reads_gguf: bool = False


# --- the forms ------------------------------------------------------------------------------------


def _load(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _quantised(dtype: torch.dtype, config: Callable[[], Any]) -> Callable[[str], Any]:
    def make(folder: str) -> Any:
        return _load(folder, dtype=dtype, quantization_config=config(), device_map={"": "cpu"})

    return make


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    return lambda: transformers.BitsAndBytesConfig(**options)


def _torchao(kind: str, **options: Any) -> Callable[[], Any]:
    def config() -> Any:
        from torchao import quantization

        return transformers.TorchAoConfig(getattr(quantization, kind)(**options))

    return config


def _torchao_int4() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    int4: Any = vars(torch)["int4"]  # unknown to type checkers
    return transformers.TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32)))


def _compressed(bits: int) -> Callable[[str], Any]:
    def make(folder: str) -> Any:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )

        model = _load(folder, dtype=torch.float32)
        weights = QuantizationArgs(num_bits=bits, strategy="channel", symmetric=True)
        config = QuantizationConfig(
            config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)},
            ignore=["lm_head"],
            quantization_status="frozen",
            format="pack-quantized",
        )
        apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                scale = module.weight.detach().abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
                module.weight_scale.data.copy_(scale)
        compressor = ModelCompressor(quantization_config=config)
        compressor.compress_model(model)
        with tempfile.TemporaryDirectory() as made:
            model.save_pretrained(made)
            compressor.update_config(made)
            return _load(made, dtype=torch.float32)

    return make


def _gguf(file: str) -> Any:
    return _load(str(Path(file).parent), gguf_file=Path(file).name, dtype=torch.float32)


def _with_adapters(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """Two LoRA adapters of random weights, `first` in use."""

    def make_both(folder: str) -> Any:
        import peft

        def lora(*modules: str) -> Any:
            return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(modules), r=8, lora_alpha=16)

        model = peft.get_peft_model(make(folder), lora("q_proj", "v_proj"), adapter_name="first")
        model.add_adapter("second", lora("up_proj", "down_proj"))
        generator = torch.Generator(device="cpu").manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05, generator=generator)
        return model.eval()

    return make_both


def _off(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def _use(*names: str) -> Callable[[Any], Any]:
    def use(model: Any) -> Any:
        model.base_model.enable_adapter_layers()
        model.base_model.set_adapter(list(names))
        return model

    return use


def _merged(model: Any) -> Any:
    _use("first")(model).merge_adapter(["first"])
    return model


def _merged_for_good(model: Any) -> Any:
    model.unmerge_adapter()
    return _use("second")(model).merge_and_unload()


_STATES: dict[str, Callable[[Any], Any]] = {
    "on": _use("first"),
    "off": _off,
    "switched": _use("second"),
    "two at once": _use("first", "second"),
    "merged": _merged,
    "merged for good": _merged_for_good,
}


def _float32(folder: str) -> Any:
    return _load(folder, dtype=torch.float32)


_BNB, _CT, _AO = ("bitsandbytes",), ("compressed-tensors",), ("torchao",)
_F32, _BF16 = torch.float32, torch.bfloat16
_AO8 = _quantised(_F32, _torchao("Int8WeightOnlyConfig"))
TARGETS = [
    Target("float32", _float32),
    Target("bitsandbytes 8-bit", _quantised(_F32, _bitsandbytes(load_in_8bit=True)), _BNB),
    Target(
        "bitsandbytes 8-bit, no outliers apart (threshold 0)",
        _quantised(_F32, _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0)),
        _BNB,
    ),
    Target(
        "bitsandbytes 4-bit NF4, float32",
        _quantised(_F32, _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        _BNB,
    ),
    Target(
        "bitsandbytes 4-bit NF4, bfloat16",
        _quantised(_BF16, _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=_BF16)),
        _BNB,
    ),
    Target("torchao int8 weights", _AO8, _AO),
    Target("torchao int8 weights, bfloat16", _quantised(_BF16, _torchao("Int8WeightOnlyConfig")), _AO),
    Target(
        "torchao int8 weights and activations", _quantised(_F32, _torchao("Int8DynamicActivationInt8WeightConfig")), _AO
    ),
    Target("torchao int4 weights", _quantised(_F32, _torchao_int4), _AO),
    Target("compressed-tensors, 8 bits packed", _compressed(8), _CT),
    Target("compressed-tensors, 4 bits packed", _compressed(4), _CT),
    Target("quanto int8", _quantised(_F32, lambda: transformers.QuantoConfig(weights="int8")), ("optimum-quanto",)),
    Target("quanto int4", _quantised(_F32, lambda: transformers.QuantoConfig(weights="int4")), ("optimum-quanto",)),
    Target("GGUF file, dequantised by transformers", _gguf, ("gguf",), reads_gguf=True),
    Target("LoRA on float32", _with_adapters(_float32), ("peft",), _STATES),
    Target("LoRA on torchao int8", _with_adapters(_AO8), ("peft", *_AO), {"on": _use("first"), "off": _off}),
    Target(
        "LoRA on bitsandbytes 4-bit",
        _with_adapters(_quantised(_F32, _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"))),
        ("peft", *_BNB),
        {"on": _use("first"), "off": _off},
    ),
]


# --- trying them ----------------------------------------------------------------------------------


@dataclass
class Row:
    """What was found of one form, in one state.

    Attributes:
        name: of the form, and of the state of its adapters.
        cells: by column of `COLUMNS`: "yes", "WRONG", "crashed: …", or why the library refuses.
        untried: why nothing could be tried.
        alone: what is done for each token by itself in passes over several.
        apart: how far the logits of passes over 8 tokens lie from those of passes over one, in standard deviations, at
            the most: with the model as it is, and with that done.
        drafted: by column, the tokens that were drafted.
    """

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    untried: str | None = None
    alone: str | None = None
    apart: tuple[float, float] | None = None
    drafted: dict[str, int] = field(default_factory=dict)


def _requests(layers: int) -> dict[str, tuple[Any, dict[str, Any], bool]]:
    """By column: what is drafted, what else the call is given, and whether it is a batch. Costs are told."""
    costs = Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)])
    fixed = DraftingConfig(policy="fixed", max_draft_length=4)

    def config(**fields: Any) -> SelfSpeculativeConfig:
        return SelfSpeculativeConfig(**{"drafting": fixed, "costs": costs, **fields})

    greedy = {"do_sample": False}
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 0}
    skip = SkipConfig(attention=[layers // 3], mlp=[layers // 2])
    return {
        "lookup": (config(lookup=True), greedy, False),
        "int8": (config(precision="int8"), greedy, False),
        "int4": (config(precision="int4"), greedy, False),
        "skipping": (config(skip=skip), greedy, False),
        "batch": (config(lookup=True, precision="int4"), greedy, True),
        "sampling": (config(lookup=True, precision="int4"), sampled, False),
        "sampled batch": (config(lookup=True, precision="int4"), sampled, True),
        "auto": ("auto", greedy, False),
    }


def try_target(target: Target, source: str, prompts: Sequence[dict[str, torch.Tensor]]) -> Iterator[Row]:
    """Load a form and hold its self-speculative texts against its plain ones.

    Args:
        target: the form.
        source: the model's folder, or the GGUF file.
        prompts: arguments of `generate` with the prompt: of a single text, and of a batch.

    Yields:
        A row for each state. What goes wrong is told in it; nothing is raised.
    """
    for package in target.needs:
        try:
            version(package)
        except PackageNotFoundError:
            yield Row(target.name, untried=f"{package} is not installed")
            return
    try:
        caller = target.make(source)
    except Exception as error:
        yield Row(target.name, untried=f"it cannot be loaded: {short(f'{type(error).__name__}: {error}')}")
        return
    for state, change in (target.states or {"": lambda model: model}).items():
        row = Row(f"{target.name}, {state}" if state else target.name)
        try:
            caller = change(caller)
            _try_state(caller, row, prompts)
        except Exception as error:
            row.untried = short(f"{type(error).__name__}: {error}")
        yield row


def _try_state(caller: Any, row: Row, prompts: Sequence[dict[str, torch.Tensor]]) -> None:
    model = caller.get_base_model() if hasattr(caller, "get_base_model") else caller
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for column, (request, extra, is_batch) in _requests(layers).items():

        def text(extra: dict[str, Any] = extra, is_batch: bool = is_batch, **more: Any) -> torch.Tensor:
            torch.manual_seed(2)
            return caller.generate(**prompts[is_batch], **options, **extra, **more)  # type: ignore[no-any-return]

        plain = text()
        enable_self_speculative(caller)

        def decode(text: Any = text, request: Any = request) -> torch.Tensor:
            return text(self_speculative=request)  # type: ignore[no-any-return]

        row.cells[column], row.drafted[column] = judged(model, plain, decode)
    why_no_drafts(caller)  # the last check was of a batch
    row.alone = state_of(model).row_by_row.get(False)
    row.apart = _apart(model)


def _apart(model: Any, width: int = 8, tokens: int = 40) -> tuple[float, float]:
    """See `Row.apart`."""
    ids = torch.arange(100, 100 + tokens, device="cpu")[None] % model.get_input_embeddings().weight.shape[0]

    def logits() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :width], **{CACHE: cache})
        found = []
        for start in range(width, tokens, width):
            with row_by_row(model, 1):
                found.append(model(input_ids=ids[:, start : start + width], **{CACHE: cache}).logits[0])
        return torch.cat(found).double()

    def single() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :width], **{CACHE: cache})
        found = [model(input_ids=ids[:, at : at + 1], **{CACHE: cache}).logits[0] for at in range(width, tokens)]
        return torch.cat(found).double()

    with torch.no_grad(), _as_is(model):
        one, as_is = single(), logits()
    with torch.no_grad():
        as_run = logits()
    spread = one.std(dim=-1)
    first, second = (float(((other - one).square().mean(dim=-1).sqrt() / spread).max()) for other in (as_is, as_run))
    return first, second


@contextlib.contextmanager
def _as_is(model: Any) -> Iterator[None]:
    """Without anything done for each token by itself."""
    known = state_of(model).row_by_row
    before = dict(known)
    known.clear()
    try:
        yield
    finally:
        known.update(before)


# --- the page -------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Quantised models and adapters

One model in every form in which its weights may be held: is its text with `self_speculative=` the text of the same form
without? This page is written by a command; another machine or other versions may give another one:

```bash
python -m tests.lab.targets --model FOLDER --gguf FILE -o docs/quantised.md
```

The columns, {tokens} new tokens each. Low-bit copies are made of what a form's layers compute with, whatever they are
held in. Batches and sampled texts draft from int4 copies and lookup; `"auto"` by whatever pays on this machine.

`yes`: nothing was refused, and the text is the same to the token. `no`, with the number of a note below: the library
refuses, by an error or by leaving the text to transformers with a warning. `WRONG`: the text is another one. `crashed`:
any other error. Of adapters, the states follow one another on one model, in the order of the rows.

A pass that verifies several tokens has to give each what a pass over it alone gives. The last columns tell how far
passes over 8 tokens lie from passes over one, in standard deviations of the logits, at the most: by the model's own
code as it is, and as it is run here; and what is done for each token by itself to that end. Attention costs little.
Linear layers take nearly as long as so many steps, so that drafting hardly pays there ([limits.md](limits.md)).
"""


def page(rows: Sequence[Row], model: str, needed: Sequence[str] = ()) -> str:
    """All that was found, as a page of Markdown.

    Args:
        rows: of the forms and states.
        model: what the model is called.
        needed: packages whose versions are told.
    """
    tried = [row for row in rows if row.untried is None]
    notes = Notes()
    heads = [*COLUMNS.values(), "apart: as it is", "as run", "token by token"]
    table = [f"| form | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for row in tried:
        shown = [notes.shown(cell, cell.rstrip("."), row.name) for cell in (row.cells.get(c, "") for c in COLUMNS)]
        apart = ["", ""] if row.apart is None else [f"{distance:.1g}" for distance in row.apart]
        table.append(f"| {row.name} | {' | '.join([*shown, *apart, row.alone or 'nothing'])} |")
    installed = []
    for package in needed:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    lines = [
        _INTRODUCTION.format(tokens=NEW_TOKENS),
        "## Counts",
        "",
        f"{', '.join([versions(), *installed])}. {model}, {cpu_name()}, {torch.get_num_threads()} threads.",
        "",
        *counted(COLUMNS, [row.cells for row in tried]),
        "",
        "## Forms",
        "",
        *table,
    ]
    if lines_of_notes := notes.lines("Forms"):
        lines += ["", "## Notes", "", *lines_of_notes]
    if untried := [row for row in rows if row.untried is not None]:
        lines += ["", "## Not tried", "", *(f"- {row.name}: {row.untried}." for row in untried)]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """The command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.

    Raises:
        SystemExit: of status 1 where a text is another one, so that nobody overlooks it.
    """
    names = [target.name for target in TARGETS]
    program = Program("targets", __doc__)
    program.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a model in float32, as saved")
    program.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file of a model, for that form")
    program.add_argument("--only", nargs="+", metavar="NAME", help=f"these forms, instead of all: {'; '.join(names)}")
    program.add_json("all rows with all reasons as JSON, instead of a page")
    program.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to the terminal")
    program.add_argument(
        "--rows", type=Path, metavar="FOLDER", help="keep rows there; the same command goes on after an interruption"
    )
    arguments = program.parsed(words)
    if not (arguments.model / "config.json").is_file():
        program.error(f"{arguments.model} is no folder with a model: it has no config.json")
    if unknown := [name for name in arguments.only or () if name not in names]:
        program.error(f"there is no form {', '.join(unknown)}; there are: {'; '.join(names)}")
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # of the quantisers, at each layer
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [dict(tokenizer(list(texts), return_tensors="pt", padding=True)) for texts in (_TEXTS[:1], _TEXTS)]
    rows: list[Row] = []
    targets = [target for target in TARGETS if arguments.only is None or target.name in arguments.only]
    with contextlib.ExitStack() as stack:
        try:
            what = {
                "benchmark": "targets",
                "model": str(arguments.model.resolve()),
                "gguf": str(arguments.gguf.resolve()) if arguments.gguf else None,
                "forms": [target.name for target in targets],
            }
            found, keep = stack.enter_context(kept_rows(arguments.rows, what))
        except (OSError, ValueError) as error:
            program.error(str(error))
        for target in targets:
            if target.reads_gguf and arguments.gguf is None:
                rows.append(Row(target.name, untried="no file was given (--gguf)"))
                continue
            kept = next((each["rows"] for each in found if each["form"] == target.name), None)
            if kept is not None:
                rows += [Row(**row) for row in kept]
                continue
            source = arguments.gguf if target.reads_gguf else arguments.model
            of_form = []
            for row in try_target(target, str(source), prompts):
                of_form.append(row)
                told = row.untried or {column: cell for column, cell in row.cells.items() if kind_of(cell) != "yes"}
                print(f"{row.name}: {told or 'yes'}", file=sys.stderr, flush=True)
            keep({"form": target.name, "rows": [asdict(row) for row in of_form]})
            rows += of_form
            gc.collect()
    needed = sorted({package for target in targets for package in target.needs})
    if arguments.json:
        text = json.dumps([asdict(row) for row in rows], indent=2) + "\n"
    else:
        text = page(rows, arguments.model.resolve().name, needed)
    if arguments.output is None:
        print(text, end="")
    else:
        write_whole(arguments.output, text)
    if any(kind_of(cell) == WRONG for row in rows for cell in row.cells.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
