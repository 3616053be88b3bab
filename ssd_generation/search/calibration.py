"""The text that drafts are judged on: the target's own greedy continuations of calibration prompts, generated once.

One pass of the target over each gives the keys and values that drafts start from; these are held in memory while the
search runs.
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
from ..forward.sublayers import input_device
from ..harness.prompts import Prompt, encode_prompt, hub_rows, read_prompts
from ..support.files import default_cache_dir, write_whole
from ..support.reading import RESULT, read_json
from ..tuning.acceptance import verify_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Calibration", "calibrate", "calibration_prompts", "describe_weights", "generate_greedily"]

logger = logging.getLogger(__name__)

_COLUMNS = ("prompt", "text", "question", "document", "article")


@dataclass(frozen=True)
class Calibration:
    """Texts of the target, and what making them took.

    Attributes:
        texts: prompt and continuation of each calibration prompt, with the target's keys and values.
        passes: forward passes of the model that it took: none for continuations that were in the cache, but one for
            each text's keys and values.
        digest: of what the model was asked, see `digest_of`.
    """

    texts: tuple[VerifiedText, ...]
    passes: int
    digest: str

    def __len__(self) -> int:
        return len(self.texts)

    def tokens(self) -> int:
        """Tokens of all continuations."""
        return sum(len(text) for text in self.texts)

    def context(self) -> int:
        """The mean number of tokens before a token that is judged."""
        return round(sum(text.prompt_length + len(text) / 2 for text in self.texts) / len(self.texts))


def calibration_prompts(
    source: str | None = None, count: int | None = None, skip: int = 0, may_be_none: bool = False
) -> list[Prompt]:
    """Calibration prompts, the categories taking turns.

    Args:
        source: a prompt file (see `prompts.read_prompts`); a data set `ID`, `ID:CONFIG`, `ID@SPLIT` or `ID#COLUMN` of
            the Hub, read by `datasets`; `None`: the built-in set of prose, chat, code, summarisation, translation and
            arithmetic.
        count: so many prompts at the most; `None`: all there are, of a data set 16.
        skip: leave out the first so many, to hold them back.
        may_be_none: whether none behind these is an answer, and not a mistake.

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
            f"{source or 'The built-in set'} has {len(mixed)} prompts, so none is left behind the first {skip}."
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
    """A fingerprint of a model: its shape, and a sample of each of its weights."""
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
    """The prompts as the model reads them, each of shape `(1, prompt_length)`.

    Raises:
        ValueError: a prompt that leaves no room for a continuation in the model's context, or too short a continuation.
    """
    if new_tokens < 2:
        raise ValueError(
            f"A continuation needs at least two tokens, since a round begins behind the first, but got "
            f"new_tokens={new_tokens}."
        )
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    encoded = []
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt.text, use_chat_template)["input_ids"]
        if isinstance(longest, int) and ids.shape[1] + new_tokens > longest:
            raise ValueError(
                f"The calibration prompt {prompt.id!r} has {ids.shape[1]} tokens; with {new_tokens} new ones that is "
                f"more than the model's context of {longest}. Take it out, or shorten it."
            )
        encoded.append(ids.to(input_device(model)))
    return encoded


def digest_of(encoded: Sequence[torch.Tensor], new_tokens: int) -> str:
    """Names what a model was asked, and for how many tokens.

    Not what it said: on another kind of machine rounding may decide a near-tie otherwise, and a worker there is as
    good.
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
    """The target's own greedy continuations, from the disk where they were made before.

    Args:
        model: the target model.
        tokenizer: its tokenizer.
        prompts: the calibration prompts.
        new_tokens: tokens of each continuation, ≥ 2; a model that ends its text earlier is judged on what there is.
        use_chat_template: put the prompts into the tokenizer's chat template, if it has one.
        progress: told how many texts of how many are done.

    Raises:
        ValueError: a prompt that leaves no room for a continuation in the model's context, or no token to judge.
    """
    encoded = encode_all(model, tokenizer, prompts, new_tokens, use_chat_template)
    texts, made = [], 0
    weights = describe_weights(model)
    for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        if progress is not None:
            progress(index, len(prompts))
        whole, passes = _continuation(model, weights, ids, new_tokens)
        made += passes
        if whole.shape[1] < ids.shape[1] + 2:
            logger.warning("The model has next to nothing to say to the calibration prompt %r: left out.", prompt.id)
            continue
        texts.append(verify_text(model, whole, ids.shape[1]))
        made += 1
    if not texts:
        raise ValueError("The model says nothing to any of the calibration prompts. Choose others with --prompts.")
    if progress is not None:
        progress(len(prompts), len(prompts))
    return Calibration(tuple(texts), made, digest_of(encoded, new_tokens))


def generate_greedily(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, **more: Any) -> torch.Tensor:
    """Prompt and the most likely continuation, whatever the model's own generation config says of sampling."""
    config = model.generation_config
    pad = None if config is None else config.pad_token_id
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
        **more,
    )


def _continuation(model: PreTrainedModel, weights: str, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, int]:
    """Prompt and continuation, and how many passes it took."""
    key = hashlib.sha256(json.dumps([weights, ids.tolist(), new_tokens]).encode()).hexdigest()[:24]
    path = default_cache_dir() / "calibration" / f"{key}.json"
    try:
        return _read_continuation(model, path, ids, new_tokens), 0
    except FileNotFoundError:
        pass
    except ValueError as error:
        logger.warning("The continuation in %s cannot be read (%s); generating it again.", path, error)
    output = generate_greedily(model, ids, new_tokens)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(output[0].tolist()))
    except OSError as error:
        logger.warning("A continuation could not be kept in %s: %s", path, error)
    return output, int(output.shape[1] - ids.shape[1])


def _read_continuation(model: PreTrainedModel, path: Path, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    known = read_json(path, RESULT)
    given, vocabulary = ids[0].tolist(), model.get_input_embeddings().weight.shape[0]
    if not (
        isinstance(known, list)
        and len(given) <= len(known) <= len(given) + new_tokens
        and all(type(token) is int and 0 <= token < vocabulary for token in known)
        and known[: len(given)] == given
    ):
        raise ValueError("it is no continuation of this prompt")
    return torch.tensor([known], device=ids.device)
