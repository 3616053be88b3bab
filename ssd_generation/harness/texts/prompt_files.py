"""Files of prompts: the formats of MT-bench, Spec-Bench, SPEED-Bench, XSum and GSM8K, and plain ones."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...support.messages import listed, shown
from ...support.reading import DATA, check_file, filled_lines, parse_json
from .prompt_types import Prompt

__all__ = ["read_prompts"]

_SUMMARISE = "Summarise the following article in three sentences.\n\n"
_FORMATS = (
    "Each line is a JSON object with 'prompt' (and 'category'), with 'turns' (MT-bench, Spec-Bench, SPEED-Bench), with "
    "'document' (an article to summarise) or with 'question' (GSM8K)."
)
_KINDS = ".jsonl (a JSON object per line), .parquet (SPEED-Bench) or .txt (a prompt per line)"

_MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
_SPEC_BENCH_ALONE = frozenset(("translation", "math_reasoning"))
"""Categories that identify Spec-Bench; it contains MT-bench's questions as well, and reports them as one category."""

_UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Beginning of a turn in SPEED-Bench's published files whose text has to be fetched from elsewhere first."""

_INPUT_LENGTH = re.compile(r"throughput[_-](\d+k)(?![a-z0-9])", re.IGNORECASE)
"""Pattern of the prompt length in tokens, in the name of a SPEED-Bench file or of its folder."""

_COLUMNS = ("category", "prompt", "turns", "document", "question")


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read the prompts of a file.

    Args:
        path: a `.jsonl` file in one of the formats of MT-bench, Spec-Bench and SPEED-Bench (`category`, `turns`), XSum
            (`document`), GSM8K (`question`) or just `prompt` and `category`; a `.parquet` file of SPEED-Bench; or a
            `.txt` file with a prompt on each line, whose category is the file's name. An input length in the name of a
            SPEED-Bench file or of its folder becomes part of the category.

    Raises:
        FileNotFoundError: no such file.
        ImportError: a `.parquet` file, and pyarrow is not installed.
        ValueError: another kind of file, an invalid line, or no prompt at all.
    """
    file = Path(os.path.expanduser(path))
    if file.suffix not in (".jsonl", ".parquet", ".txt"):
        raise ValueError(f"A prompt file is {_KINDS}, but got {str(path)!r}.")
    try:
        prompts = _prompts(file, str(path))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no prompt file {str(path)!r}. A prompt file is {_KINDS}.") from error
    if not prompts:
        raise ValueError(f"The prompt file {str(path)!r} is empty. {_FORMATS}")
    if any(prompt.category in _SPEC_BENCH_ALONE for prompt in prompts):
        prompts = [replace(p, category="mt_bench") if p.category in _MT_BENCH else p for p in prompts]
    if (length := _input_length(file)) is not None:
        prompts = [replace(p, category=f"{p.category}-{length}") for p in prompts]
    return prompts


def _prompts(file: Path, shown_path: str) -> list[Prompt]:
    if file.suffix == ".txt":
        return [Prompt(f"{file.stem}-{n}", file.stem, line.strip()) for n, line in filled_lines(file, DATA)]
    prompts = []
    for number, entry in _entries(file):
        try:
            category, text, later = _parse(entry(), file.stem)
        except ValueError as error:
            place = "row" if file.suffix == ".parquet" else "line"
            raise ValueError(f"{shown_path}, {place} {number}: {error} {_FORMATS}") from error
        prompts.append(Prompt(f"{file.stem}-{number}", category, text, later))
    return prompts


def _entries(file: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield the number of each line and a function that returns its content, or raises `ValueError` if unreadable."""
    if file.suffix == ".jsonl":
        for number, line in filled_lines(file, DATA):
            yield number, partial(parse_json, line)
        return
    for number, row in enumerate(_rows_of_parquet(file), start=1):
        yield number, row.copy


def _rows_of_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            f"{str(file)!r} is a Parquet file, and reading it needs pyarrow: pip install pyarrow"
        ) from error
    check_file(file, DATA)
    try:
        table = parquet.ParquetFile(file)
        columns = [name for name in _COLUMNS if name in table.schema_arrow.names] or None
        for batch in table.iter_batches(batch_size=256, columns=columns):
            yield from batch.to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's own errors are of these kinds
        raise ValueError(f"{str(file)!r} is not a Parquet file that can be read: {str(error)[:200]}") from error


def _input_length(file: Path) -> str | None:
    names = (file.stem, file.absolute().parent.name)
    found = next((match for name in names if (match := _INPUT_LENGTH.search(name)) is not None), None)
    return None if found is None else found[1].lower()


def _parse(entry: Any, stem: str) -> tuple[str, str, tuple[str, ...]]:
    """Return category, text and later turns of one line."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"a JSON object is needed, but got {type(entry).__name__}.")
    for key, category, before in (
        ("prompt", stem, ""),
        ("turns", stem, ""),
        ("document", "summarisation", _SUMMARISE),
        ("question", "arithmetic", ""),
    ):
        if key not in entry:
            continue
        value = entry[key]
        turns = value if key == "turns" and isinstance(value, list) and value else [value]
        if not all(isinstance(text, str) and text.strip() for text in turns):
            raise ValueError(f"{key!r} holds no text, but {shown(value)}.")
        if any(text.startswith(_UNRESOLVED) for text in turns):
            raise ValueError(
                "this text of SPEED-Bench is not in the published file. NVIDIA's specdec_bench fetches it: give the "
                "file that its prepare_data.py writes."
            )
        first, *later = (text.strip() for text in turns)
        return str(entry.get("category") or category), before + first, tuple(later)
    raise ValueError(f"there is no prompt in it; its keys are {listed(entry)}.")
