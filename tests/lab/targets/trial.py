"""Trial of one form: comparison of its self-speculative texts with its plain ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from ssd_generation.config import Costs, DraftingConfig, SelfSpeculativeConfig, SkipConfig
from ssd_generation.forward.eager.row_by_row import RowByRowPart, row_by_row
from ssd_generation.generation import disable_self_speculative, enable_self_speculative, why_no_drafts
from ssd_generation.support.model_state import state_of
from ssd_generation.support.versions import CACHE

from ..tables import judged, short
from .folders import try_folder
from .forms import Target

__all__ = ["COLUMNS", "NEW_TOKENS", "Row", "try_target"]

COLUMNS = {
    "lookup": "lookup",
    "int8": "int8 copies",
    "int4": "int4 copies",
    "skipping": "skipping",
    "batch": "batch",
    "sampling": "sampling",
    "sampled batch": "sampled batch",
    "auto": '"auto"',
    "always": "`always`",
}
"""Ways to draft that each form is tried with, and the headings of their columns."""

NEW_TOKENS = 64


@dataclass
class Row:
    """Outcome of one form, in one state.

    Attributes:
        name: name of the form, and of the state of its adapters.
        cells: outcomes by column of `COLUMNS`: "yes", "WRONG", "crashed: …", or the reason of a refusal.
        untried: reason why nothing could be tried.
        alone: parts of the model that passes over several tokens run for each token separately.
        apart: largest distance of the logits of passes over 8 tokens from those of passes over one, in standard
            deviations: with the model as it is, and with those parts run separately.
        drafted: numbers of drafted tokens by column.
        folders: outcomes by column of `folders.FOLDERS`, where these were tried.
    """

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    untried: str | None = None
    alone: str | None = None
    apart: tuple[float, float] | None = None
    drafted: dict[str, int] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)


def _requests(layers: int) -> dict[str, tuple[Any, dict[str, Any], bool]]:
    """Return, by column, the request, other options of the call, and whether it is a batch. Costs are given."""
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
        "always": (config(lookup=True, precision="int4"), greedy, False),
    }


def try_target(
    target: Target, source: str, prompts: Sequence[dict[str, torch.Tensor]], of_tokenizer: Path | None = None
) -> Iterator[Row]:
    """Load a form and compare its self-speculative texts with its plain ones.

    Args:
        target: form of the weights.
        source: folder of the model, or the GGUF file.
        prompts: arguments of `generate` with the prompt: those of a single text, and those of a batch.
        of_tokenizer: folder with the tokenizer, to try the form as a folder as well.

    Yields:
        A row for each state, which reports what goes wrong; nothing is raised.
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
            if of_tokenizer is not None and target.has_folder:
                row.folders = try_folder(disable_self_speculative(caller), of_tokenizer)
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

        def decode(text: Any = text, request: Any = request, column: str = column) -> torch.Tensor:
            if column != "always":
                return text(self_speculative=request)  # type: ignore[no-any-return]
            enable_self_speculative(caller, default=request, always=True)
            try:
                return text()  # type: ignore[no-any-return]
            finally:
                enable_self_speculative(caller, always=False)

        row.cells[column], row.drafted[column] = judged(model, plain, decode)
    why_no_drafts(caller)  # checks a single text again: the last check was of a batch
    row.alone = state_of(model).get(RowByRowPart).row_by_row.get(False)
    row.apart = _apart(model)


def _apart(model: Any, width: int = 8, tokens: int = 40) -> tuple[float, float]:
    """Return `Row.apart` of a model."""
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
    """Run no part of the model for each token separately within the block."""
    known = state_of(model).get(RowByRowPart).row_by_row
    before = dict(known)
    known.clear()
    try:
        yield
    finally:
        known.update(before)
