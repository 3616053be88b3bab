"""Texts that drafts are judged on: the target model's greedy continuations of calibration prompts, generated once.

One forward pass of the target over each text yields the KV cache that drafts start from. These caches are held in
memory while the search runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..decoding.verified_text import VerifiedText
from ..forward.structure.sublayers import input_device
from ..harness.texts import Prompt, encode_prompt, hub_rows, read_prompts
from ..support.files import default_cache_dir
from ..support.reading import RESULT, read_json
from ..support.trusted import UntrustedFolderError, say_not_stored, store
from ..support.unasked import only_asked_drafts
from ..tuning.acceptance import verify_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Calibration", "calibrate", "calibration_prompts", "describe_weights", "generate_greedily"]

logger = logging.getLogger(__name__)

_COLUMNS = ("prompt", "text", "question", "document", "article")


@dataclass(frozen=True)
class Calibration:
    """Texts of the target model, and the number of forward passes they took.

    Attributes:
        texts: each prompt with its continuation and the target's KV cache.
        passes: forward passes of the model: one per generated token, none for a continuation cached on disk, and one
            per text for its KV cache.
        digest: hash of the prompts, see `digest_of`.
    """

    texts: tuple[VerifiedText, ...]
    passes: int
    digest: str

    def __len__(self) -> int:
        return len(self.texts)

    def tokens(self) -> int:
        """Return the number of tokens in all continuations."""
        return sum(len(text) for text in self.texts)

    def context(self) -> int:
        """Return the mean prefix length of the judged tokens."""
        return round(sum(text.prompt_length + len(text) / 2 for text in self.texts) / len(self.texts))


def calibration_prompts(
    source: str | None = None, count: int | None = None, skip: int = 0, may_be_none: bool = False
) -> list[Prompt]:
    """Return calibration prompts, alternating between their categories.

    Args:
        source: a prompt file (see `harness.texts.read_prompts`); a data set `ID`, `ID:CONFIG`, `ID@SPLIT` or
            `ID#COLUMN` on the Hub, read by `datasets`; `None`: the built-in set of prose, chat, code, summarisation,
            translation and arithmetic.
        count: maximum number of prompts; `None`: all of them, or 16 of a data set.
        skip: number of prompts at the beginning to leave out.
        may_be_none: whether to return an empty list, rather than raise an error, if no prompt follows those skipped.

    Raises:
        FileNotFoundError: no such file.
        ImportError: `datasets` is not installed.
        ValueError: a file or data set that cannot be read, or too few prompts.
    """
    if count is not None and count < 1:
        raise ValueError(f"At least one calibration prompt is needed, but got {count}.")
    wanted = None if count is None else count + skip
    if source is None:
        entries = json.loads(resources.files(__package__).joinpath("calibration.json").read_text(encoding="utf-8"))
        found = [Prompt(entry["id"], entry["category"], entry["prompt"]) for entry in entries["prompts"]]
    elif os.path.lexists(os.path.expanduser(source)) or source.endswith((".jsonl", ".txt")):
        found = read_prompts(source)
    else:
        found = _from_hub(source, wanted or 16)
    if not found:
        raise ValueError(f"{source!r} holds no prompt: all of its rows are blank.")
    groups: dict[str, list[Prompt]] = {}
    for prompt in found:
        groups.setdefault(prompt.category, []).append(prompt)
    longest = max(map(len, groups.values()))
    mixed = [group[i] for i in range(longest) for group in groups.values() if i < len(group)]
    chosen = mixed[skip:wanted]
    if not chosen and not may_be_none:
        raise ValueError(
            f"{source or 'The built-in set'} has {len(mixed)} prompts, so none is left after the first {skip}."
        )
    return chosen


def _from_hub(source: str, count: int) -> list[Prompt]:
    found = hub_rows(source, count, "train", "Give a .jsonl or .txt file.")
    column = found.column or next((c for c in _COLUMNS if c in found.rows[0]), "")
    if column not in found.rows[0]:
        raise ValueError(
            f"The data set {source!r} has the columns {', '.join(found.rows[0])}; name the one with the prompts: "
            "ID#COLUMN."
        )
    texts = [str(row[column]) for row in found.rows]
    return [Prompt(f"{found.name}-{i}", found.name, text) for i, text in enumerate(texts) if text.strip()]


def describe_weights(model: PreTrainedModel) -> str:
    """Return a hash of a model: names, shapes and types of its weights, and a sample of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sample = parameter.detach().reshape(-1)[:: max(1, parameter.numel() // 16)][:16].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {sample.tolist()}".encode())
    return digest.hexdigest()[:16]


def encode_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    new_tokens: int = 32,
    use_chat_template: bool = True,
) -> list[torch.Tensor]:
    """Return the token ids of the prompts, each of shape `(1, prompt_length)`.

    Raises:
        ValueError: a prompt with its continuation is longer than the model's context, or `new_tokens` is below 2.
    """
    if new_tokens < 2:
        raise ValueError(
            f"A continuation needs at least two tokens, since a round begins after the first, but got "
            f"new_tokens={new_tokens}."
        )
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    encoded = []
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt.text, use_chat_template)["input_ids"]
        if isinstance(longest, int) and ids.shape[1] + new_tokens > longest:
            raise ValueError(
                f"The calibration prompt {prompt.id!r} has {ids.shape[1]} tokens; with {new_tokens} new ones that is "
                f"more than the model's context of {longest}. Remove it, or shorten it."
            )
        encoded.append(ids.to(input_device(model)))
    return encoded


def digest_of(encoded: Sequence[torch.Tensor], new_tokens: int) -> str:
    """Return a hash of the prompts and the number of new tokens.

    The continuations are not part of it: on another machine rounding may decide a near tie differently, and a worker
    there may still join the study.
    """
    content = json.dumps([[ids.tolist() for ids in encoded], new_tokens])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    new_tokens: int = 32,
    use_chat_template: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Return the target model's greedy continuations, from the cache on disk if they were generated before.

    Args:
        model: the target model.
        tokenizer: its tokenizer.
        prompts: the calibration prompts.
        new_tokens: tokens of each continuation, ≥ 2; fewer where the model ends its text earlier.
        use_chat_template: whether to apply the tokenizer's chat template to the prompts, if it has one.
        progress: callback with the number of texts done, and of all texts.

    Raises:
        ValueError: a prompt with its continuation is longer than the model's context, or there is no token to judge.
    """
    encoded = encode_all(model, tokenizer, prompts, new_tokens, use_chat_template)
    texts, total_passes = [], 0
    weights = describe_weights(model)
    for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        if progress is not None:
            progress(index, len(prompts))
        whole, passes = _continuation(model, weights, ids, new_tokens)
        total_passes += passes
        if whole.shape[1] < ids.shape[1] + 2:
            logger.warning("The model generates almost nothing for the calibration prompt %r: left out.", prompt.id)
            continue
        texts.append(verify_text(model, whole, ids.shape[1]))
        total_passes += 1
    if not texts:
        raise ValueError("The model generates nothing for any calibration prompt. Choose others with --prompts.")
    if progress is not None:
        progress(len(prompts), len(prompts))
    return Calibration(tuple(texts), total_passes, digest_of(encoded, new_tokens))


def generate_greedily(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    """Return prompt and greedy continuation; sampling settings in the model's generation config are overridden."""
    config = model.generation_config
    pad = None if config is None else config.pad_token_id
    with only_asked_drafts():
        return model.generate(  # type: ignore[no-any-return]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=new_tokens,
            pad_token_id=0 if pad is None else pad,
            **options,
        )


def _continuation(model: PreTrainedModel, weights: str, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, int]:
    """Return prompt and continuation, and the number of forward passes it took."""
    key = hashlib.sha256(json.dumps([weights, ids.tolist(), new_tokens]).encode()).hexdigest()[:24]
    try:
        cache = default_cache_dir()
    except ValueError as error:
        say_not_stored(logger, error)
        output = generate_greedily(model, ids, new_tokens)
        return output, int(output.shape[1] - ids.shape[1])
    path = cache / "calibration" / f"{key}.json"
    try:
        return _read_continuation(model, path, cache, ids, new_tokens), 0
    except FileNotFoundError:
        pass
    except UntrustedFolderError as error:
        say_not_stored(logger, error)
    except ValueError as error:
        logger.warning("The continuation in %s cannot be read (%s); generating it again.", path, error)
    output = generate_greedily(model, ids, new_tokens)
    try:
        store(path, json.dumps(output[0].tolist()).encode(), cache)
    except UntrustedFolderError as error:
        say_not_stored(logger, error)
    return output, int(output.shape[1] - ids.shape[1])


def _read_continuation(
    model: PreTrainedModel, path: Path, cache: Path, ids: torch.Tensor, new_tokens: int
) -> torch.Tensor:
    tokens = read_json(path, RESULT, within=cache)
    prompt, vocabulary = ids[0].tolist(), model.get_input_embeddings().weight.shape[0]
    if not (
        isinstance(tokens, list)
        and len(prompt) <= len(tokens) <= len(prompt) + new_tokens
        and all(type(token) is int and 0 <= token < vocabulary for token in tokens)
        and tokens[: len(prompt)] == prompt
    ):
        raise ValueError("it is not a continuation of this prompt")
    return torch.tensor([tokens], device=ids.device)
