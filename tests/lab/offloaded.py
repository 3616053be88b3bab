"""Speed of a model with weights on the disk and less memory than weights: plain decoding and this library's.

    python -m tests.lab.offloaded --model FOLDER [--memory 3.3] [--tokens 48] [--json]

Plain decoding and `self_speculative="auto"` of each prompt are interleaved, and the texts are compared. A control group
(version 1 or 2, Linux, root) limits memory, page cache included: otherwise reads would not come from the disk. The run
has its own copy of the model's files, so that it does not read what another process has in the page cache. Where no
group can be made, these files are dropped from the page cache before each pass of the model (`posix_fadvise`). Before
the run, a process that makes the low-bit copies is killed in the middle (SIGKILL): the measurement begins with what
that process left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_generation.forward.copies.low_bit import CopiesPart
from ssd_generation.forward.copies.resident import FOLDER
from ssd_generation.forward.structure.offloaded import sources_of, streamed_bytes
from ssd_generation.generation import enable_self_speculative
from ssd_generation.support.machine import cpu_name
from ssd_generation.support.model_state import state_of
from ssd_generation.tuning.learnt import LearntPart

from .program import Program

__all__ = ["memory_group", "run"]

PROMPTS = (
    "# Reads a CSV file and gives the mean of each numeric column.\nimport csv\n\ndef column_means(path):\n",
    "def merge_intervals(intervals):\n    '''Merge all overlapping intervals and return them sorted.'''\n",
    "class LRUCache:\n    '''A cache of fixed capacity that drops what was used least recently.'''\n\n    def __init__",
    "-- SQL: for each customer the three most expensive orders of the last year\nSELECT",
)

_KILLED_AT = 12
"""Number of copies on the disk at which the first process is killed."""


# ----------------------------------------------------------------------------------------------------------------------
# memory


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """Make a control group with so many bytes of memory, page cache included; yield `None` if that is not possible."""
    root = Path("/sys/fs/cgroup")
    for controllers, top, name in (("memory", root / "memory", "memory.limit_in_bytes"), ("", root, "memory.max")):
        folder = None
        try:
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            own = next(path for _, found, path in (line.split(":", 2) for line in lines) if found == controllers)
            folder = top / own.lstrip("/") / f"ssd-offloaded-{os.getpid()}"
            folder.mkdir()
            (folder / name).write_text(str(limit))
        except (OSError, StopIteration):
            if folder is not None and folder.exists():
                folder.rmdir()
            continue
        try:
            yield folder
        finally:
            folder.rmdir()
        return
    yield None


def _drop(files: Iterable[Path]) -> None:
    """Drop files from the page cache, so that they are next read from the disk."""
    for name in files:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _drop_before_passes(model: Any) -> None:
    files = {path for source in sources_of(model).values() if (path := source.file()) is not None}
    model.register_forward_pre_hook(lambda *_: _drop(files))


def _own_copy(model: str, folder: str) -> str:
    """Copy the model's files to a folder of the run's own, and drop them from the page cache."""
    source = Path(model) if Path(model).is_dir() else Path(snapshot_download(model))
    copied = Path(shutil.copytree(source, Path(folder) / "model"))
    _drop(path for path in copied.iterdir() if path.is_file())
    return str(copied)


# ----------------------------------------------------------------------------------------------------------------------
# in a child process


def _load(options: argparse.Namespace) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), device_map={"": "disk"}, offload_folder=options.folder
    ).eval()
    model.generation_config.eos_token_id = None
    return tokenizer, enable_self_speculative(model)


def _read_bytes() -> int:
    """Return the bytes that this process has read from a disk so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


class _Loads:
    """Counter of the bytes that accelerate loads."""

    def __init__(self) -> None:
        from accelerate.utils import OffloadedWeightsLoader

        self.bytes = 0
        original = OffloadedWeightsLoader.__getitem__

        def load(loader: Any, key: str) -> Any:
            tensor = original(loader, key)
            self.bytes += tensor.nbytes
            return tensor

        OffloadedWeightsLoader.__getitem__ = load


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, in a child process."""
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    loads = _Loads()
    tokenizer, model = _load(options)
    if options.drops:
        _drop_before_passes(model)
    about = {"seconds_to_load": time.perf_counter() - started, "streamed_bytes": streamed_bytes(model)}
    calls: list[dict[str, Any]] = []

    def call(name: str, inputs: Any, tokens: int, **extra: Any) -> list[int]:
        loaded, read, began = loads.bytes, _read_bytes(), time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **extra)
        seconds = time.perf_counter() - began
        new: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
        calls.append(
            {
                "method": name,
                "seconds": seconds,
                "tokens": len(new),
                "loaded_bytes": loads.bytes - loaded,
                "read_bytes": _read_bytes() - read,
            }
        )
        if extra.get("self_speculative") is not None:
            statistics = model.last_speculation
            calls[-1] |= {
                "refusal": statistics.refusal,
                "drafted": statistics.drafted_tokens,
                "accepted": statistics.accepted_tokens,
                "rounds": statistics.target_passes,
            }
        print(json.dumps(calls[-1]), file=sys.stderr, flush=True)
        return new

    same = []
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 50}
    for place, text in enumerate((PROMPTS * options.prompts)[: options.prompts]):
        inputs = tokenizer(text, return_tensors="pt")
        how: dict[str, Any] = sampling if options.sample else {"do_sample": False}
        if place == 0:  # includes all that is made, read or measured once
            torch.manual_seed(place)
            call("first call", inputs, options.tokens, self_speculative="auto", **how)
        texts = {}
        for method in ("plain", "drafted") if place % 2 == 0 else ("drafted", "plain"):
            torch.manual_seed(place)
            extra = {"self_speculative": "auto"} if method == "drafted" else {}
            texts[method] = call(method, inputs, options.tokens, **how, **extra)
        same.append(texts["plain"] == texts["drafted"])
    draft: Any = state_of(model).get(CopiesPart).resident
    costs = next(iter(state_of(model).get(LearntPart).policies)).costs
    return {
        **about,
        "calls": calls,
        "same_text": same,
        "copies": None if draft is None else {"made": draft.made, "read": draft.read, "bytes": draft.num_bytes()},
        "costs": None if costs is None else costs.to_dict(),
    }


def _copy(options: argparse.Namespace) -> None:
    """Make the low-bit copies, in a child process that is killed meanwhile."""
    torch.set_num_threads(options.threads)
    tokenizer, model = _load(options)
    model.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=3, self_speculative="auto")


# ----------------------------------------------------------------------------------------------------------------------
# in the parent process


def _child(options: argparse.Namespace, group: Path | None, what: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "tests.lab.offloaded", "--model", options.model]
    arguments += ["--child", what, "--folder", options.folder, "--dtype", options.dtype]
    for name in ("tokens", "prompts", "threads"):
        arguments += [f"--{name}", str(getattr(options, name))]
    arguments += ["--sample"] * options.sample + ["--drops"] * (group is None)

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, preexec_fn=enter)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Kill a process that makes copies, and measure in another one."""
    with memory_group(int(options.memory * 1e9)) as group:
        killed = _child(options, group, "copy")
        copies = Path(options.folder) / FOLDER
        while killed.poll() is None and len(list(copies.glob("*.safetensors"))) < _KILLED_AT:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        left = sorted(path.name for path in copies.iterdir()) if copies.is_dir() else []
        process = _child(options, group, "measure")
        try:
            output, _ = process.communicate()
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise SystemExit(f"The run ended with {process.returncode}.")
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {
        "machine": f"{cpu_name()}, {options.threads} threads, {platform.system()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "dtype": options.dtype,
        "memory": "control group" if group is not None else "page cache dropped before each pass",
        "memory_bytes": int(options.memory * 1e9) if group is not None else None,
        "left_by_the_killed": {"copies": sum(not name.startswith(".") for name in left), "files": len(left)},
        **measured,
    }


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['machine']}; {found['dtype']}; " + ", ".join(f"{k} {v}" for k, v in found["versions"].items()),
        f"A pass brings {found['streamed_bytes'] / 1e9:.2f} GB into memory; memory: {found['memory']}"
        + ("" if found["memory_bytes"] is None else f", {found['memory_bytes'] / 1e9:.2f} GB, page cache included"),
        f"Copies that the killed process had stored: {found['left_by_the_killed']['copies']}. "
        f"Then: {found['copies'] or 'none'}.",
        "",
        "method          tokens/s   loaded/token   read from disk/token   passes",
    ]
    for method in ("plain", "drafted", "first call"):
        calls = [call for call in found["calls"] if call["method"] == method]
        tokens, seconds = sum(c["tokens"] for c in calls), sum(c["seconds"] for c in calls)
        loaded, read = (sum(c[key] for c in calls) / tokens / 1e9 for key in ("loaded_bytes", "read_bytes"))
        passes = sum(c["loaded_bytes"] for c in calls) / found["streamed_bytes"]
        lines.append(f"{method:14}{tokens / seconds:10.3f}{loaded:12.2f} GB{read:20.2f} GB{passes:9.1f}")
    pairs = {m: sum(c["seconds"] for c in found["calls"] if c["method"] == m) for m in ("plain", "drafted")}
    lines += ["", f"{pairs['plain'] / pairs['drafted']:.2f} times plain; same text: {found['same_text']}"]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the module's docstring.

    Args:
        words: the command line; `None` for that of the process.
    """
    program = Program("offloaded", __doc__)
    program.add_argument("--model", required=True, help="a folder, or a Hub id")
    program.add_argument("--memory", type=float, default=3.3, help="GB (10^9 bytes) for the process and its page cache")
    program.add_counts(tokens=48, prompts=2, threads=torch.get_num_threads())
    program.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    program.add_argument("--sample", action="store_true", help="sample, by the same seed, instead of greedy search")
    program.add_argument(
        "--folder",
        help="a folder on the disk to be measured, for the files of the run",
    )
    program.add_json()
    program.add_argument("--child", choices=("copy", "measure"), help=argparse.SUPPRESS)
    program.add_argument("--drops", action="store_true", help=argparse.SUPPRESS)
    options = program.parsed(words)
    if options.child == "copy":
        return _copy(options)
    if options.child == "measure":
        return print(json.dumps(_measured(options)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits normally, so that the folder of the run is removed
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = str(Path(folder) / "offloaded")
        options.model = _own_copy(options.model, folder)
        found = run(options)
    print(json.dumps(found, indent=1) if options.json else _table(found))


if __name__ == "__main__":
    main()
